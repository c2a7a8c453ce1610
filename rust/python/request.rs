//! What one receive has open.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};

use super::arena_map::{PyArenaMap, PyLease};
use super::arguments::{Limit, Threads, u64_of};
use super::buffers::{Base, ReadBuffer};
use super::endpoint::PyWorkerEndpoint;
use super::segments::PySegment;
use super::{GIL_RELEASE_BYTES, detached_when_big, interruptible};
use crate::Error;
use crate::arena::LeaseHandle;
use crate::memory::Target;
use crate::pool::Piece;
use crate::request::{Entry, Extent, Extents, GivenBack, Growing, Item, Kept, Opener, Request, Run};

/// What giving back came to: (items, segments unlinked, leases released, what failed).
type Outcome = (usize, usize, usize, Vec<(String, Py<PyAny>)>);

/// What is open: bytes, and indices of leases.
type Opened<'py> = (Bound<'py, PyTuple>, Bound<'py, PyTuple>);

/// Opens the items of requests, and gives back what is not received.
#[pyclass(frozen, name = "RequestOpener", module = "mmcopy._native")]
pub(super) struct PyRequestOpener {
    opener: Arc<Opener>,
}

#[pymethods]
impl PyRequestOpener {
    #[new]
    #[pyo3(
        signature = (shm_dir, accept_prefixes, endpoint, *, timeout_s),
        text_signature = "(shm_dir, accept_prefixes, endpoint, *, timeout_s)"
    )]
    fn new(
        shm_dir: PathBuf,
        accept_prefixes: Vec<String>,
        endpoint: Option<Py<PyWorkerEndpoint>>,
        timeout_s: Limit,
    ) -> Self {
        let find_arena = endpoint.map(|endpoint| -> crate::request::FindArena {
            Box::new(move |handle| endpoint.get().core().find_arena_of(handle))
        });
        Self { opener: Arc::new(Opener::new(shm_dir, accept_prefixes, find_arena, timeout_s.0)) }
    }

    /// A request of these tensors, with nothing open yet.
    fn request(&self, items: Vec<Bound<'_, PyAny>>) -> PyResult<PyRequest> {
        self.opener.check_process()?;
        let items = items.iter().map(item_of).collect::<PyResult<_>>()?;
        Ok(PyRequest { request: Request::new(&self.opener, items) })
    }

    /// Unlinks the segments and releases the leases that these tensors or handles name, unread.
    fn release(&self, py: Python<'_>, items: Vec<Bound<'_, PyAny>>) -> PyResult<Outcome> {
        self.opener.check_process()?;
        let items = items.iter().map(item_of).collect::<PyResult<Vec<_>>>()?;
        // How many pages are freed here is not known before.
        let given_back = py.detach(|| {
            let mut given_back = GivenBack::default();
            items.iter().for_each(|item| self.opener.release(item, &mut given_back));
            given_back
        });
        Ok(outcome_of(py, given_back))
    }

    /// Segments that were closed and are not freed yet.
    #[getter]
    fn pending(&self) -> usize {
        self.opener.reaper.pending()
    }

    /// Blocks until all that was closed is freed; False at the limit.
    fn join(&self, py: Python<'_>, timeout_s: Limit) -> bool {
        py.detach(|| self.opener.reaper.join(timeout_s.0))
    }
}

/// The items of one receive, and what is open of them.
#[pyclass(frozen, name = "Request", module = "mmcopy._native")]
pub(super) struct PyRequest {
    pub(super) request: Request,
}

#[pymethods]
impl PyRequest {
    /// Opens every item, or raises the error of the first that cannot be opened; the bytes of each, and which are leases.
    fn open_all<'py>(&self, py: Python<'py>) -> PyResult<Opened<'py>> {
        self.request.open_all()?;
        self.opened(py)
    }

    /// Opens what can be opened here; the index and the error of each item that is out of reach.
    fn open_reachable(&self, py: Python<'_>) -> PyResult<Vec<(usize, Py<PyAny>)>> {
        Ok(self.request.open_reachable()?.into_iter().map(|(index, error)| (index, raised(py, error))).collect())
    }

    /// Takes over open segments, one for each item that is not inline; the indices of the items without one.
    fn open_attached(&self, segments: Vec<Option<Bound<'_, PySegment>>>) -> Vec<usize> {
        self.request.open_attached(segments.iter().map(|segment| segment.as_ref()?.get().take()).collect())
    }

    /// What is open: the bytes of each item, and the indices of those that are leases.
    fn opened<'py>(&self, py: Python<'py>) -> PyResult<Opened<'py>> {
        let sizes = PyTuple::new(py, self.request.entries().iter().map(|entry| entry.nbytes()))?;
        Ok((sizes, PyTuple::new(py, self.request.leases_in(None))?))
    }

    /// Of these items (None: of all), how many tensors and bytes come by each path.
    #[pyo3(signature = (items = None), text_signature = "($self, items=None)")]
    fn totals(&self, items: Option<Vec<usize>>) -> Vec<(&'static str, usize, u64)> {
        let all = self.request.items();
        let mut totals: Vec<(&str, usize, u64)> = Vec::new();
        let mut add = |item: &Item| {
            let path = item.path();
            match totals.iter_mut().find(|(known, ..)| *known == path) {
                Some((_, count, nbytes)) => (*count, *nbytes) = (*count + 1, *nbytes + item.nbytes()),
                None => totals.push((path, 1, item.nbytes())),
            }
        };
        match items {
            None => all.iter().for_each(add),
            Some(indices) => indices.iter().filter_map(|index| all.get(*index)).for_each(&mut add),
        }
        totals
    }

    /// A request of these alone: open items of this one by their indices, and tensors in the message.
    fn select(&self, parts: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let open = self.request.entries();
        let entry_of = |part: &Bound<'_, PyAny>| -> PyResult<Arc<Entry>> {
            if let Ok(index) = part.extract::<usize>() {
                let missing =
                    || Error::NoSuch { piece: index, chunk: 0, kind: "item", index: index as u64, count: open.len() };
                return Ok(open.get(index).cloned().ok_or_else(missing)?);
            }
            match item_of(part)? {
                Item::Inline(entry) => Ok(entry),
                _ => Err(Error::NotInline.into()),
            }
        };
        let entries = parts.iter().map(entry_of).collect::<PyResult<_>>()?;
        Ok(Self { request: self.request.select(entries) })
    }

    /// The arenas of the open leases, each once.
    fn arenas(&self) -> Vec<PyArenaMap> {
        self.request.arenas().into_iter().map(PyArenaMap::new).collect()
    }

    /// Indices of the open leases of these arenas.
    fn leases_in<'py>(&self, py: Python<'py>, arenas: Vec<Bound<'py, PyArenaMap>>) -> PyResult<Bound<'py, PyTuple>> {
        let arenas: Vec<_> = arenas.iter().map(|arena| arena.get().core()).collect();
        PyTuple::new(py, self.request.leases_in(Some(&arenas)))
    }

    /// The copies (dest, source, nbytes) of what is written of these extents, and the parts (item, start, nbytes, dest) to
    /// be followed. From here on these leases stay claimed until `flags_written` or `keep`. Never blocks.
    #[pyo3(
        signature = (extents, addresses, *, max_gap_bytes, part_bytes),
        text_signature = "($self, extents, addresses, *, max_gap_bytes, part_bytes)"
    )]
    #[allow(clippy::type_complexity)]
    fn runs(
        &self,
        extents: &Bound<'_, PyExtents>,
        addresses: Vec<u64>,
        max_gap_bytes: u64,
        part_bytes: u64,
    ) -> PyResult<(Vec<(u64, u64, u64)>, Vec<(usize, u64, u64, u64)>)> {
        let (runs, growing) = self.request.runs(&extents.get().extents, &addresses, max_gap_bytes, part_bytes)?;
        let parts = growing.into_iter().map(|part| (part.item, part.start, part.nbytes, part.dest)).collect();
        Ok((numbers_of(&runs), parts))
    }

    /// Blocks, without the GIL, until `least` bytes of a part (item, start, nbytes, dest) are written; how many can be
    /// copied, and the copies.
    #[pyo3(signature = (part, least, *, part_bytes), text_signature = "($self, part, least, *, part_bytes)")]
    #[allow(clippy::type_complexity)]
    fn follow(
        &self,
        py: Python<'_>,
        part: (usize, u64, u64, u64),
        least: u64,
        part_bytes: u64,
    ) -> PyResult<(u64, Vec<(u64, u64, u64)>)> {
        let (item, start, nbytes, dest) = part;
        let part = Growing { item, start, nbytes, dest };
        let (there, runs) = interruptible(py, |asked| self.request.follow(part, least, part_bytes, asked))?;
        Ok((there, numbers_of(&runs)))
    }

    /// Where the words are that end the leases which copies read, and what to write: (address, value) each.
    fn flags(&self) -> Vec<(usize, u32)> {
        self.request.flags().into_iter().map(|flag| (flag.address, flag.value)).collect()
    }

    /// A stream writes the first `count` of the flags, so nothing else releases these leases any more.
    fn flags_written(&self, count: usize) -> PyResult<()> {
        Ok(self.request.flags_written(count)?)
    }

    /// The leases that copies read and whose flags no stream writes.
    fn keep(&self) -> PyKeptLeases {
        PyKeptLeases { kept: self.request.keep() }
    }

    /// An open lease that is released when the result, and every buffer of it, is gone. Blocks, without the GIL, until its
    /// sender has written it.
    fn take_lease(&self, py: Python<'_>, index: usize) -> PyResult<PyLease> {
        let (map, claim) = interruptible(py, |asked| self.request.take_lease(index, asked))?;
        Ok(PyLease::released_when_dropped(map, claim))
    }

    /// Puts extents into host memory. Blocks, without the GIL when it is much or a sender is still writing.
    #[pyo3(signature = (extents, bases, *, num_threads), text_signature = "($self, extents, bases, *, num_threads)")]
    fn read(
        &self,
        py: Python<'_>,
        extents: &Bound<'_, PyExtents>,
        bases: Vec<Base>,
        num_threads: Threads,
    ) -> PyResult<()> {
        let targets: Vec<Target<'_>> = bases.iter().map(Base::target).collect();
        let extents = &extents.get().extents;
        let nbytes: u64 = extents.iter().map(|extent| extent.nbytes).sum();
        if nbytes < GIL_RELEASE_BYTES && self.request.is_written(extents) {
            return Ok(self.request.read(extents, &targets, num_threads.0, &|| false)?);
        }
        interruptible(py, |asked| self.request.read(extents, &targets, num_threads.0, asked))
    }

    /// Whether a segment still has its name.
    #[getter]
    fn has_names(&self) -> bool {
        self.request.has_names()
    }

    /// Removes the names of the segments, once. What is open stays readable.
    fn unlink(&self, py: Python<'_>) -> Outcome {
        let given_back = detached_when_big(py, self.request.file_nbytes(), || self.request.unlink());
        outcome_of(py, given_back)
    }

    /// Unlinks what still has a name, releases the leases and closes the segments; with `release_rest` also gives back the
    /// items that are not open.
    fn close(&self, py: Python<'_>, release_rest: bool) -> Outcome {
        let nbytes = if release_rest { GIL_RELEASE_BYTES } else { self.request.file_nbytes() };
        let given_back = detached_when_big(py, nbytes, || self.request.close(release_rest));
        outcome_of(py, given_back)
    }
}

/// Leases that copies read. Dropping this releases none.
#[pyclass(frozen, name = "KeptLeases", module = "mmcopy._native")]
pub(super) struct PyKeptLeases {
    kept: Kept,
}

#[pymethods]
impl PyKeptLeases {
    fn __len__(&self) -> usize {
        self.kept.len()
    }

    /// Releases them: the copies have ended.
    fn release(&self, py: Python<'_>) -> Outcome {
        outcome_of(py, self.kept.release())
    }
}

/// Extents of one layout, each (source, base, window, source_start, dest_start, nbytes).
#[pyclass(frozen, name = "Extents", module = "mmcopy._native")]
pub(super) struct PyExtents {
    extents: Extents,
}

#[pymethods]
impl PyExtents {
    #[new]
    fn new(extents: Vec<(usize, usize, usize, u64, u64, u64)>) -> Self {
        let extent = |(source, base, _, source_start, dest_start, nbytes)| Extent {
            source,
            base,
            source_start,
            dest_start,
            nbytes,
        };
        Self { extents: Extents(extents.into_iter().map(extent).collect()) }
    }

    fn __len__(&self) -> usize {
        self.extents.len()
    }
}

/// What fills the slots of a request's chunks.
#[pyclass(frozen, name = "ChunkTable", module = "mmcopy._native")]
pub(super) struct PyChunkTable {
    pub(super) staged: Vec<usize>,
    pub(super) pieces: Vec<Piece>,
}

#[pymethods]
impl PyChunkTable {
    #[new]
    fn new(staged: Vec<usize>, fills: Vec<[Bound<'_, PyAny>; 5]>) -> PyResult<Self> {
        Ok(Self { staged, pieces: fills.iter().enumerate().map(piece_of).collect::<PyResult<_>>()? })
    }

    fn __len__(&self) -> usize {
        self.pieces.len()
    }
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

fn numbers_of(runs: &[Run]) -> Vec<(u64, u64, u64)> {
    runs.iter().map(|run| (run.dest, run.source, run.nbytes)).collect()
}

fn outcome_of(py: Python<'_>, given_back: GivenBack) -> Outcome {
    let GivenBack { num_items, num_removed, num_released, failures } = given_back;
    let failures = failures.into_iter().map(|(what, error)| (what, raised(py, error))).collect();
    (num_items, num_removed, num_released, failures)
}

fn raised(py: Python<'_>, error: Error) -> Py<PyAny> {
    PyErr::from(error).into_value(py).into_any()
}

/// The classes of mmcopy.tensors that this distinguishes.
struct Classes {
    tensor: Py<PyType>,
    handle: Py<PyType>,
}

fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let module = py.import("mmcopy.tensors")?;
        let class = |name: &str| Ok::<_, PyErr>(module.getattr(name)?.cast_into::<PyType>()?.unbind());
        Ok(Classes { tensor: class("TensorData")?, handle: class("ShmHandle")? })
    })
}

fn is_one(given: &Bound<'_, PyAny>, class: &Py<PyType>) -> PyResult<bool> {
    Ok(given.get_type().is(class) || given.is_instance(class.bind(given.py()))?)
}

/// What a TensorData, or a ShmHandle by itself, says.
fn item_of(given: &Bound<'_, PyAny>) -> PyResult<Item> {
    let py = given.py();
    let classes = classes(py)?;
    let payload =
        if is_one(given, &classes.tensor)? { given.getattr(pyo3::intern!(py, "payload"))? } else { given.clone() };
    if !is_one(&payload, &classes.handle)? {
        let buffer: ReadBuffer = payload.getattr(pyo3::intern!(py, "data"))?.extract()?;
        // M5: the item keeps the buffer exported.
        return Ok(Item::inline(buffer.lasting_source(), Box::new(buffer)));
    }
    let field = |name| payload.getattr(name);
    let offset: u64 = field(pyo3::intern!(py, "offset"))?.extract()?;
    let nbytes: u64 = field(pyo3::intern!(py, "nbytes"))?.extract()?;
    let (name, owner_id) = (field(pyo3::intern!(py, "name"))?, field(pyo3::intern!(py, "owner_id"))?);
    let (name, owner_id) = (name.cast::<PyString>()?, owner_id.cast::<PyString>()?);
    match name.to_str() {
        Ok(name) => Ok(Item::named(name, offset, nbytes, &owner_id.to_string_lossy())),
        // A str with surrogates has no UTF-8, and protobuf gives none.
        Err(_) => {
            let name = name.to_string_lossy();
            if LeaseHandle::is_lease_name(&name) {
                return Ok(Item::named(&name, offset, nbytes, &owner_id.to_string_lossy()));
            }
            let name = Err(Error::Name { name: name.into_owned(), reason: "it is not Unicode" });
            Ok(Item::Segment { name, offset, nbytes })
        }
    }
}
