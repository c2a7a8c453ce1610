//! The closed table of dtypes. Names are torch's, without the prefix; a name outside the table is an error.

use crate::{Error, Result};

/// One element type. The order is that of [`Dtype::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant is the dtype that its name says")]
pub enum Dtype {
    Float64,
    Float32,
    Float16,
    Bfloat16,
    Float8E4m3fn,
    Float8E5m2,
    Float8E4m3fnuz,
    Float8E5m2fnuz,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Bool,
}

impl Dtype {
    /// Every dtype there is.
    pub const ALL: [Self; 17] = [
        Self::Float64,
        Self::Float32,
        Self::Float16,
        Self::Bfloat16,
        Self::Float8E4m3fn,
        Self::Float8E5m2,
        Self::Float8E4m3fnuz,
        Self::Float8E5m2fnuz,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Bool,
    ];

    /// The dtype of this exact name.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| Error::UnknownDtype { name: name.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
    }

    /// torch's name, without the prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float64 => "float64",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float8E4m3fn => "float8_e4m3fn",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Float8E4m3fnuz => "float8_e4m3fnuz",
            Self::Float8E5m2fnuz => "float8_e5m2fnuz",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Uint8 => "uint8",
            Self::Uint16 => "uint16",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
            Self::Bool => "bool",
        }
    }

    /// Bytes an element.
    pub const fn itemsize(self) -> usize {
        match self {
            Self::Float64 | Self::Int64 | Self::Uint64 => 8,
            Self::Float32 | Self::Int32 | Self::Uint32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 | Self::Uint16 => 2,
            Self::Float8E4m3fn
            | Self::Float8E5m2
            | Self::Float8E4m3fnuz
            | Self::Float8E5m2fnuz
            | Self::Int8
            | Self::Uint8
            | Self::Bool => 1,
        }
    }

    /// How many elements these bytes are; an error when it is not a whole number.
    pub fn elements(self, nbytes: usize) -> Result<usize> {
        if nbytes.is_multiple_of(self.itemsize()) {
            Ok(nbytes / self.itemsize())
        } else {
            Err(Error::PartialElement { nbytes, dtype: self.name(), itemsize: self.itemsize() })
        }
    }

    /// The bytes of so many elements; an error when they cannot be addressed.
    pub fn nbytes(self, elements: usize) -> Result<usize> {
        elements
            .checked_mul(self.itemsize())
            .filter(|nbytes| isize::try_from(*nbytes).is_ok())
            .ok_or(Error::TooManyBytes { elements, dtype: self.name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(dtype.name()), Ok(dtype));
        }
    }

    #[test]
    fn names_outside_the_table_are_refused_with_the_table() {
        for name in ["", "float", "Float32", "float32 ", "torch.float32", "bf16", "complex64"] {
            let error = Dtype::parse(name).unwrap_err();
            assert!(error.to_string().contains("bfloat16"), "{error}");
        }
    }

    #[test]
    fn partial_elements_are_refused() {
        assert_eq!(Dtype::Float32.elements(8), Ok(2));
        assert_eq!(Dtype::Float32.elements(7), Err(Error::PartialElement { nbytes: 7, dtype: "float32", itemsize: 4 }));
    }

    #[test]
    fn more_bytes_than_an_address_space_are_refused() {
        assert!(matches!(Dtype::Float32.nbytes(usize::MAX / 4), Err(Error::TooManyBytes { .. })));
        assert!(matches!(Dtype::Float64.nbytes(usize::MAX), Err(Error::TooManyBytes { .. })));
    }
}
