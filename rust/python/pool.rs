//! The copy pool and its jobs.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::arguments::{Limit, Threads, u64_of};
use super::buffers::WriteBuffer;
use super::request::{PyChunkTable, PyRequest};
use super::{detached_when_big, interruptible};
use crate::pool::{self, Job, Piece, Pool, Table};
use crate::request::Entry;
use crate::{Error, Result};

/// Starts threads that copy for the whole process until there are num_threads, 256 at most; how many there are.
///
/// They sleep while there is no work and stay until the process ends. Where the system refuses some there are fewer, a
/// later copy tries again, and callers do the rest of their copies themselves. A forked child has none.
#[pyfunction]
pub(super) fn start_copy_threads(py: Python<'_>, num_threads: Threads) -> usize {
    py.detach(|| pool::start_threads(num_threads.0.get()))
}

/// Threads that copy from segments and memory into a ring of slots; they sleep while there is nothing to do.
#[pyclass(frozen, name = "CopyPool", module = "mmcopy._native")]
pub(super) struct PyCopyPool {
    pool: Pool,
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

    /// Takes a job on: chunk i of the table is written into slot i % len(slots). Nothing is copied before CopyJob.permit.
    ///
    /// Blocks, without the GIL, while the senders of staged leases are still writing them. PayloadError or SegmentSizeError
    /// when a fill does not fit, LeaseError, MmcopyTimeoutError, ClosedError after close.
    fn start(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyRequest>,
        slots: Vec<WriteBuffer>,
        table: &Bound<'_, PyChunkTable>,
    ) -> PyResult<PyCopyJob> {
        let (table, buffers) = table_of(py, request.get(), slots, table.get())?;
        let job = self.pool.start(table)?;
        Ok(PyCopyJob { job, buffers: Mutex::new(Some(buffers)) })
    }

    /// Copies a table of one chunk into one slot on the calling thread; the other threads have no part in it.
    ///
    /// What is raised is as for start. Blocks until every byte is there.
    fn copy_now(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyRequest>,
        slot: WriteBuffer,
        table: &Bound<'_, PyChunkTable>,
    ) -> PyResult<()> {
        let nbytes = slot.nbytes();
        // The buffers stay exported until the copy is done (M5).
        let (table, _buffers) = table_of(py, request.get(), vec![slot], table.get())?;
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
    _entries: Vec<Arc<Entry>>,
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
    py: Python<'_>,
    request: &PyRequest,
    slots: Vec<WriteBuffer>,
    table: &PyChunkTable,
) -> PyResult<(Table, Buffers)> {
    let open = request.request.entries();
    let entry_of = |&index: &usize| {
        let missing = || Error::NoSuch { piece: index, chunk: 0, kind: "item", index: index as u64, count: open.len() };
        open.get(index).cloned().ok_or_else(missing)
    };
    let entries = table.staged.iter().map(entry_of).collect::<Result<Vec<_>>>()?;
    if entries.iter().any(|entry| entry.is_lease()) {
        interruptible(py, |asked| request.request.wait_written(&entries, asked))?;
    }
    let (sources, starts): (Vec<_>, Vec<_>) = entries.iter().map(|entry| entry.copy_source()).unzip();
    let shifted: Vec<Piece>;
    let pieces = if starts.iter().all(|start| *start == 0) {
        &table.pieces
    } else {
        let start_of =
            |piece: &Piece| usize::try_from(piece.source).ok().and_then(|source| starts.get(source)).copied();
        let shift = |piece: &Piece| Piece {
            source_start: piece.source_start.saturating_add(start_of(piece).unwrap_or(0)),
            ..*piece
        };
        shifted = table.pieces.iter().map(shift).collect();
        &shifted
    };
    let buffers = Buffers { _entries: entries, slots };
    let targets = buffers.slots.iter().map(WriteBuffer::lasting_target).collect();
    Ok((Table::new(sources, targets, pieces)?, buffers))
}
