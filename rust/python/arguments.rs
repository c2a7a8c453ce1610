//! Arguments that are checked while they are taken.

use std::num::NonZeroUsize;

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
