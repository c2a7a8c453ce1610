//! The copy pool and its jobs.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use super::arguments::{Limit, Threads, u64_of};
use super::buffers::{ReadBuffer, WriteBuffer};
use super::detached_when_big;
use super::segments::PySegment;
use crate::Error;
use crate::pool::{CopySource, Job, Piece, Pool, Table};

/// Threads that copy from segments and memory into a ring of slots; they sleep while there is nothing to do.
#[pyclass(frozen, name = "CopyPool", module = "mmcopy._native")]
pub(super) struct PyCopyPool {
    pool: Pool,
}

/// A source as Python gives it.
#[derive(FromPyObject)]
pub(super) enum GivenSource<'py> {
    Segment(Bound<'py, PySegment>),
    Memory(ReadBuffer),
}

#[pymethods]
impl PyCopyPool {
    #[new]
    fn new(py: Python<'_>, num_threads: Threads) -> PyResult<Self> {
        Ok(Self { pool: py.detach(|| Pool::new(num_threads.0))? })
    }

    /// Threads that it was made with.
    #[getter]
    fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Takes a job on: chunk i is written into slot i % len(slots). Nothing is copied before CopyJob.permit.
    ///
    /// A piece is (chunk, source, source_start, slot_start, nbytes). Never blocks. PayloadError or SegmentSizeError when
    /// a piece does not fit, ClosedError after close or for a closed segment.
    fn start(
        &self,
        sources: Vec<GivenSource<'_>>,
        slots: Vec<WriteBuffer>,
        pieces: Vec<[Bound<'_, PyAny>; 5]>,
    ) -> PyResult<PyCopyJob> {
        let (table, buffers) = table_of(sources, slots, &pieces)?;
        let job = self.pool.start(table)?;
        Ok(PyCopyJob { job, buffers: Mutex::new(Some(buffers)) })
    }

    /// Copies pieces of one chunk into one slot on the calling thread; the other threads have no part in it.
    ///
    /// The pieces and what is raised are as for start. Blocks until every byte is there.
    fn copy_now(
        &self,
        py: Python<'_>,
        sources: Vec<GivenSource<'_>>,
        slot: WriteBuffer,
        pieces: Vec<[Bound<'_, PyAny>; 5]>,
    ) -> PyResult<()> {
        let nbytes = slot.nbytes();
        // The buffers stay exported until the copy is done (M5).
        let (table, _buffers) = table_of(sources, vec![slot], &pieces)?;
        Ok(detached_when_big(py, nbytes, || self.pool.copy_now(&table))?)
    }

    /// Wakes up to num_threads threads for a job that is about to start. Never blocks.
    fn wake(&self, num_threads: usize) {
        self.pool.wake(num_threads);
    }

    /// Refuses further jobs and blocks until the threads have ended, each after the chunk that it copies.
    ///
    /// The rest of a job is copied by the thread that waits for it. May be called again. MmcopyTimeoutError at the limit.
    fn close(&self, py: Python<'_>, timeout_s: Limit) -> PyResult<()> {
        Ok(py.detach(|| self.pool.close(timeout_s.0))?)
    }

    fn __repr__(&self) -> String {
        format!("<mmcopy._native.CopyPool of {} threads>", self.pool.num_threads())
    }
}

/// Chunks that are being copied. Keeps its buffers exported and its segments open until it is over: every chunk waited
/// for, an error raised, cancelled, or dropped.
#[pyclass(frozen, name = "CopyJob", module = "mmcopy._native")]
pub(super) struct PyCopyJob {
    // Fields are dropped in this order: no buffer goes before the job is over (M5).
    job: Job,
    buffers: Mutex<Option<Buffers>>,
}

/// What a job's memory belongs to.
struct Buffers {
    sources: Vec<ReadBuffer>,
    slots: Vec<WriteBuffer>,
}

#[pymethods]
impl PyCopyJob {
    /// Number of chunks.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.job.num_chunks()
    }

    /// Lets the chunks below upto start: their slots are free. Only rises. Never blocks.
    fn permit(&self, upto: usize) -> PyResult<()> {
        Ok(self.job.permit(upto)?)
    }

    /// Blocks, without the GIL, until the chunk is in its slot, and copies chunks that no thread has begun meanwhile. How
    /// many chunks in a row, this one first, are there.
    ///
    /// After an error of any chunk it raises that one, and nothing is copied any more. MmcopyTimeoutError at the limit,
    /// ClosedError when the job was cancelled before this chunk, PayloadError for a chunk that there is not.
    fn wait(&self, py: Python<'_>, index: &Bound<'_, PyAny>, timeout_s: Limit) -> PyResult<usize> {
        let index = self.index_of(index)?;
        let is_there = self.job.num_there_from(index) > 0;
        // An error of any chunk comes first, and a job of which this was the last ends: the core's wait does both.
        let outcome =
            if is_there { self.job.wait(index, timeout_s.0) } else { py.detach(|| self.job.wait(index, timeout_s.0)) };
        self.release_when_over();
        outcome?;
        Ok(self.job.num_there_from(index))
    }

    /// Whether the chunk is in its slot. Never blocks.
    fn is_done(&self, index: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_done = self.job.is_done(self.index_of(index)?)?;
        if is_done {
            self.release_when_over();
        }
        Ok(is_done)
    }

    /// No further chunk starts; blocks until those that run have ended. May be called again.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.job.cancel());
        self.release_when_over();
    }

    fn __repr__(&self) -> String {
        format!("<mmcopy._native.CopyJob of {} chunks>", self.job.num_chunks())
    }
}

impl PyCopyJob {
    fn index_of(&self, index: &Bound<'_, PyAny>) -> PyResult<usize> {
        let given = u64_of(index)?.and_then(|index| usize::try_from(index).ok());
        let missing = || Error::ChunkIndex { index: index.to_string(), num_chunks: self.job.num_chunks() };
        Ok(given.ok_or_else(missing)?)
    }

    fn release_when_over(&self) {
        if self.job.is_over() {
            let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(buffers);
        }
    }
}

/// The checked table, and what keeps its memory.
fn table_of(
    sources: Vec<GivenSource<'_>>,
    slots: Vec<WriteBuffer>,
    pieces: &[[Bound<'_, PyAny>; 5]],
) -> PyResult<(Table, Buffers)> {
    let pieces = pieces.iter().enumerate().map(piece_of).collect::<PyResult<Vec<_>>>()?;
    let mut buffers = Buffers { sources: Vec::new(), slots };
    let mut checked = Vec::with_capacity(sources.len());
    for source in sources {
        checked.push(match source {
            GivenSource::Segment(segment) => CopySource::Segment(segment.get().opened()?),
            GivenSource::Memory(buffer) => {
                let memory = CopySource::Memory(buffer.lasting_source());
                buffers.sources.push(buffer);
                memory
            }
        });
    }
    let targets = buffers.slots.iter().map(WriteBuffer::lasting_target).collect();
    Ok((Table::new(checked, targets, &pieces)?, buffers))
}

fn piece_of((place, numbers): (usize, &[Bound<'_, PyAny>; 5])) -> PyResult<Piece> {
    let mut checked = [0; 5];
    for (number, given) in checked.iter_mut().zip(numbers) {
        *number = u64_of(given)?.ok_or_else(|| {
            let given: Vec<_> = numbers.iter().map(ToString::to_string).collect();
            Error::PieceNumbers { piece: place, given: format!("({})", given.join(", ")) }
        })?;
    }
    let [chunk, source, source_start, slot_start, nbytes] = checked;
    Ok(Piece { chunk, source, source_start, slot_start, nbytes })
}
