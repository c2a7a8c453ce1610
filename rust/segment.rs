//! Segments: one tensor in one file of a shared-memory file system. The sender writes it, the consumer reads it and
//! removes it.

mod open;
mod write;

pub use open::Segment;
pub(crate) use open::unlink;
pub use write::write;

#[cfg(test)]
mod tests;
