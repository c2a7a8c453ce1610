//! Arguments that are checked while they are taken.

use std::num::NonZeroUsize;
use std::time::Duration;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::Error;
use crate::cast::Cast;
use crate::dtype::Dtype;
use crate::name::SegmentName;

/// A number of threads, at least 1.
pub(super) struct Threads(pub NonZeroUsize);

impl Threads {
    pub(super) const ONE: Self = Self(NonZeroUsize::MIN);
}

impl FromPyObject<'_, '_> for Threads {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let num_threads: i64 = given.extract()?;
        usize::try_from(num_threads)
            .ok()
            .and_then(NonZeroUsize::new)
            .map(Self)
            .ok_or_else(|| Error::Threads { num_threads }.into())
    }
}

/// The limit of a wait in seconds. What is left until a deadline can be negative: then the limit is reached at once.
pub(super) struct Limit(pub Duration);

impl FromPyObject<'_, '_> for Limit {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let seconds: f64 = given.extract()?;
        if seconds.is_nan() {
            return Err(Error::Limit { given: seconds.to_string() }.into());
        }
        // What is too much for a Duration is longer than anybody waits.
        Ok(Self(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)))
    }
}

/// The name of a segment, validated.
pub(super) struct Name(pub SegmentName);

impl FromPyObject<'_, '_> for Name {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let given = given.cast::<PyString>()?;
        match given.to_str() {
            Ok(name) => Ok(Self(SegmentName::parse(name)?)),
            // A str with surrogates has no UTF-8, and protobuf gives none.
            Err(_) => {
                Err(Error::Name { name: given.to_string_lossy().into_owned(), reason: "it is not Unicode" }.into())
            }
        }
    }
}

/// What a pair of dtype names asks for.
pub(super) enum Conversion {
    /// The bytes as they are, which are whole elements of this dtype.
    Copy(Dtype),
    /// A cast.
    Cast(Cast),
}

impl Conversion {
    pub(super) fn between(src_dtype: &str, dst_dtype: &str) -> Result<Self, Error> {
        let (from, to) = (Dtype::parse(src_dtype)?, Dtype::parse(dst_dtype)?);
        if from == to { Ok(Self::Copy(from)) } else { Cast::between(from, to).map(Self::Cast) }
    }

    /// Both names or neither.
    pub(super) fn optional(src_dtype: Option<&str>, dst_dtype: Option<&str>) -> Result<Option<Self>, Error> {
        match (src_dtype, dst_dtype) {
            (None, None) => Ok(None),
            (Some(src_dtype), Some(dst_dtype)) => Self::between(src_dtype, dst_dtype).map(Some),
            _ => {
                let shown = |dtype: Option<&str>| dtype.unwrap_or("None").to_owned();
                Err(Error::HalfACast { src_dtype: shown(src_dtype), dst_dtype: shown(dst_dtype) })
            }
        }
    }
}

/// None for an int that is no u64: such a number comes off the wire or out of arithmetic on it, and is a wrong size like
/// any other.
pub(super) fn u64_of(given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match given.extract() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(given.py()) => Ok(None),
        Err(error) => Err(error),
    }
}
