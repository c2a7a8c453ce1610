//! Words of shared memory: the standard library's atomics, or loom's, which tries every order of their steps.

#[cfg(loom)]
pub(super) use loom::sync::atomic::fence;
pub(super) use std::sync::atomic::Ordering;
#[cfg(not(loom))]
pub(super) use std::sync::atomic::fence;

/// A number that another process may change at any moment.
pub(super) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
}

macro_rules! word {
    ($($atomic:ty: $number:ty),*) => {
        $(impl Word<$number> for $atomic {
            fn load(&self, order: Ordering) -> $number {
                <$atomic>::load(self, order)
            }
            fn store(&self, value: $number, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
        })*
    };
}
word!(std::sync::atomic::AtomicU32: u32, std::sync::atomic::AtomicU64: u64);
#[cfg(loom)]
word!(loom::sync::atomic::AtomicU32: u32, loom::sync::atomic::AtomicU64: u64);
