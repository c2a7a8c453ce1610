//! What this machine has left for a process: memory and cores.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::MemoryBudget;

/// What limits this process's memory, as an arena is held against it: available, limited_by, machine, limit, used.
#[pyfunction]
#[pyo3(signature = (proc = PathBuf::from("/proc")), text_signature = "(proc='/proc')")]
pub(super) fn memory_budget(py: Python<'_>, proc: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let MemoryBudget { available, machine_nbytes, group } = MemoryBudget::read(&proc);
    let budget = PyDict::new(py);
    budget.set_item("available", available.as_ref().map(|available| available.nbytes))?;
    budget.set_item("limited_by", available.map(|available| available.limited_by))?;
    budget.set_item("machine", machine_nbytes)?;
    budget.set_item("limit", group.map(|group| group.limit_nbytes))?;
    budget.set_item("used", group.map(|group| group.used_nbytes))?;
    Ok(budget)
}

/// Cores that this process can keep busy: its affinity and its control group's quota, rounded down, at least 1.
#[pyfunction]
pub(super) fn available_cores() -> PyResult<usize> {
    Ok(std::thread::available_parallelism()?.get())
}
