//! What a job copies: chunks of pieces, checked against the sources and slots before anything moves (M2).

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use crate::memory::{Source, Target};
use crate::segment::Segment;
use crate::streaming::{self, Store};
use crate::{Error, Result};

/// Where bytes come from.
#[derive(Clone, Debug)]
pub enum CopySource {
    /// An open segment, read by `pread`.
    Segment(Arc<Segment>),
    /// Memory that outlives the job (M5).
    Memory(Source<'static>),
}

/// A run of bytes that goes from one source into the slot of its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which chunk it belongs to. Pieces come in the order of their chunks, which are counted from 0 without gaps.
    pub chunk: u64,
    /// Which source.
    pub source: u64,
    /// First byte in the source; in a segment the file's offset.
    pub source_start: u64,
    /// First byte in the slot.
    pub slot_start: u64,
    /// Bytes.
    pub nbytes: u64,
}

/// A piece whose numbers have been checked.
#[derive(Clone, Copy, Debug)]
struct Checked {
    source: usize,
    source_start: u64,
    slot_start: usize,
    nbytes: usize,
}

/// A checked table: chunk `i` goes into slot `i % slots.len()`. Two pieces that share bytes of one slot give one or the
/// other there.
#[derive(Debug)]
pub struct Table {
    sources: Vec<CopySource>,
    slots: Vec<Target<'static>>,
    pieces: Vec<Checked>,
    /// The first piece of each chunk, and the number of pieces.
    starts: Vec<usize>,
}

impl CopySource {
    fn check(&self, piece: usize, chunk: usize, wanted: &Piece) -> Result<()> {
        match self {
            Self::Segment(segment) => segment.check(wanted.source_start, wanted.nbytes),
            Self::Memory(memory) => {
                let found = Found { piece, chunk, kind: "source", index: wanted.source, nbytes: memory.nbytes() };
                found.check(wanted.source_start, wanted.nbytes)
            }
        }
    }
}

impl Table {
    /// Checks every piece against its source and its slot.
    pub fn new(sources: Vec<CopySource>, slots: Vec<Target<'static>>, pieces: &[Piece]) -> Result<Self> {
        let mut checked = Vec::with_capacity(pieces.len());
        let mut starts = Vec::new();
        for (place, piece) in pieces.iter().enumerate() {
            let chunk = chunk_of(place, piece, &mut starts)?;
            let missing = |kind, index, count| Error::NoSuch { piece: place, chunk: piece.chunk, kind, index, count };
            let source = usize::try_from(piece.source).ok().filter(|index| *index < sources.len());
            let source = source.ok_or_else(|| missing("source", piece.source, sources.len()))?;
            sources[source].check(place, chunk, piece)?;
            let slot = chunk.checked_rem(slots.len()).ok_or_else(|| missing("slot", 0, 0))?;
            let found = Found { piece: place, chunk, kind: "slot", index: slot as u64, nbytes: slots[slot].nbytes() };
            found.check(piece.slot_start, piece.nbytes)?;
            // No loss: both are below the bytes of a slot, which is a usize.
            let (slot_start, nbytes) = (piece.slot_start as usize, piece.nbytes as usize);
            checked.push(Checked { source, source_start: piece.source_start, slot_start, nbytes });
        }
        starts.push(checked.len());
        Ok(Self { sources, slots, pieces: checked, starts })
    }

    /// Number of chunks.
    pub const fn num_chunks(&self) -> usize {
        self.starts.len() - 1
    }

    /// Copies one chunk into its slot.
    pub(super) fn copy(&self, chunk: usize, store: Store) -> Result<()> {
        let slot = self.slots[chunk % self.slots.len()];
        for piece in &self.pieces[self.pieces_of(chunk)] {
            let target = slot.slice(piece.slot_start..piece.slot_start + piece.nbytes);
            match &self.sources[piece.source] {
                CopySource::Segment(segment) => segment.read_into(target, piece.source_start, NonZeroUsize::MIN)?,
                CopySource::Memory(memory) => {
                    // No loss: checked against the memory's length, which is a usize.
                    let start = piece.source_start as usize;
                    streaming::copy(memory.slice(start..start + piece.nbytes), target, store);
                }
            }
        }
        Ok(())
    }

    fn pieces_of(&self, chunk: usize) -> Range<usize> {
        self.starts[chunk]..self.starts[chunk + 1]
    }
}

/// Memory that a piece names.
struct Found {
    piece: usize,
    chunk: usize,
    kind: &'static str,
    index: u64,
    nbytes: usize,
}

impl Found {
    fn check(&self, start: u64, wanted_nbytes: u64) -> Result<()> {
        let nbytes = self.nbytes as u64;
        match start.checked_add(wanted_nbytes) {
            Some(end) if end <= nbytes => Ok(()),
            _ => {
                let Self { piece, chunk, kind, index, .. } = *self;
                Err(Error::PieceRange { piece, chunk, kind, index, start, wanted_nbytes, nbytes })
            }
        }
    }
}

/// The piece's chunk, which is the one before's or the next.
fn chunk_of(place: usize, piece: &Piece, starts: &mut Vec<usize>) -> Result<usize> {
    let next = starts.len();
    if piece.chunk == next as u64 {
        starts.push(place);
        return Ok(next);
    }
    match next.checked_sub(1) {
        Some(last) if piece.chunk == last as u64 => Ok(last),
        last => {
            let expected = last.map_or_else(|| "0".to_owned(), |last| format!("{last} or {next}"));
            Err(Error::ChunkOrder { piece: place, chunk: piece.chunk, expected })
        }
    }
}
