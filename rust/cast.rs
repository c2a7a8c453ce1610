//! Casting while copying. Every cast is elementwise, rounds to nearest, ties to even, keeps infinities, signed zeros
//! and subnormals, and turns a NaN into a NaN of the same sign.
//!
//! Elements pass through two arrays on the stack, a block at a time: source and target need no alignment and may be
//! written by others meanwhile (M1), the loops over the arrays vectorise, and the arrays stay in the first-level cache.

use std::convert::Infallible;
use std::num::NonZeroUsize;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::Dtype;
use crate::memory::{Plain, Source, Target};
use crate::workers::Plan;
use crate::{Error, Result};

/// Elements a block: 4 KiB of float32.
const BLOCK: usize = 1024;

/// A supported pair of dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the cast that its name says")]
pub enum Cast {
    Float32ToBfloat16,
    Bfloat16ToFloat32,
    Float32ToFloat16,
    Float16ToFloat32,
    Uint8ToFloat32,
    Uint8ToBfloat16,
    Uint8ToFloat16,
}

impl Cast {
    /// Every cast there is.
    pub const ALL: [Self; 7] = [
        Self::Float32ToBfloat16,
        Self::Bfloat16ToFloat32,
        Self::Float32ToFloat16,
        Self::Float16ToFloat32,
        Self::Uint8ToFloat32,
        Self::Uint8ToBfloat16,
        Self::Uint8ToFloat16,
    ];

    /// The cast between two dtypes.
    pub fn between(from: Dtype, to: Dtype) -> Result<Self> {
        Self::ALL.into_iter().find(|cast| cast.from() == from && cast.to() == to).ok_or_else(|| {
            let pairs = Self::ALL.map(|cast| format!("{} to {}", cast.from().name(), cast.to().name()));
            Error::UnsupportedCast { from: from.name(), to: to.name(), supported: pairs.join(", ") }
        })
    }

    /// Source dtype.
    pub const fn from(self) -> Dtype {
        match self {
            Self::Float32ToBfloat16 | Self::Float32ToFloat16 => Dtype::Float32,
            Self::Bfloat16ToFloat32 => Dtype::Bfloat16,
            Self::Float16ToFloat32 => Dtype::Float16,
            Self::Uint8ToFloat32 | Self::Uint8ToBfloat16 | Self::Uint8ToFloat16 => Dtype::Uint8,
        }
    }

    /// Target dtype.
    pub const fn to(self) -> Dtype {
        match self {
            Self::Bfloat16ToFloat32 | Self::Float16ToFloat32 | Self::Uint8ToFloat32 => Dtype::Float32,
            Self::Float32ToBfloat16 | Self::Uint8ToBfloat16 => Dtype::Bfloat16,
            Self::Float32ToFloat16 | Self::Uint8ToFloat16 => Dtype::Float16,
        }
    }

    /// Bytes that come out of `src_nbytes` bytes.
    pub fn dst_nbytes(self, src_nbytes: usize) -> Result<usize> {
        self.to().nbytes(self.from().elements(src_nbytes)?)
    }

    /// Casts on the calling thread.
    ///
    /// # Panics
    ///
    /// When the two do not have the same number of whole elements.
    pub(crate) fn apply(self, source: Source<'_>, target: Target<'_>) {
        match self {
            Self::Float32ToBfloat16 => blockwise(source, target, float32_to_bfloat16),
            Self::Bfloat16ToFloat32 => blockwise(source, target, bfloat16_to_float32),
            Self::Float32ToFloat16 => blockwise(source, target, float32_to_float16),
            Self::Float16ToFloat32 => blockwise(source, target, float16_to_float32),
            Self::Uint8ToFloat32 => blockwise(source, target, uint8_to_float32),
            Self::Uint8ToBfloat16 => blockwise(source, target, uint8_to_bfloat16),
            Self::Uint8ToFloat16 => blockwise(source, target, uint8_to_float16),
        }
    }
}

/// Casts all of `source` into `target`. Blocks until all elements are there. The two must not share memory.
pub fn cast(kind: Cast, source: Source<'_>, target: Target<'_>, num_threads: NonZeroUsize) -> Result<()> {
    let (src_nbytes, dst_nbytes) = (source.nbytes(), target.nbytes());
    let wanted_nbytes = kind.dst_nbytes(src_nbytes)?;
    if dst_nbytes != wanted_nbytes {
        return Err(Error::Lengths { src_nbytes, dst_nbytes, wanted_nbytes });
    }
    if source.overlaps(target) {
        return Err(Error::Overlap { src_nbytes, dst_nbytes });
    }
    let (from, to) = (kind.from().itemsize(), kind.to().itemsize());
    let unit_bytes = NonZeroUsize::new(from.max(to)).unwrap_or(NonZeroUsize::MIN);
    let plan = Plan::new(src_nbytes / from, unit_bytes, num_threads);
    let done: std::result::Result<(), Infallible> = plan.run(|range| {
        let part = source.slice(range.start * from..range.end * from);
        kind.apply(part, target.slice(range.start * to..range.end * to));
        Ok(())
    });
    done.unwrap_or_else(|never| match never {});
    Ok(())
}

fn blockwise<S: Plain, D: Plain>(source: Source<'_>, target: Target<'_>, kernel: impl Fn(&[S], &mut [D])) {
    let elements = source.nbytes() / size_of::<S>();
    assert_eq!(source.nbytes(), elements * size_of::<S>(), "a part of an element is left over");
    assert_eq!(target.nbytes(), elements * size_of::<D>(), "source and target differ in elements");
    let mut input = [S::default(); BLOCK];
    let mut output = [D::default(); BLOCK];
    let mut done = 0;
    while done < elements {
        let count = BLOCK.min(elements - done);
        source.load(done * size_of::<S>(), &mut input[..count]);
        kernel(&input[..count], &mut output[..count]);
        target.store(done * size_of::<D>(), &output[..count]);
        done += count;
    }
}

/// Written without a branch, unlike `half::bf16::from_f32`, so that it vectorises. Same results.
#[inline]
fn round_to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    // To even: half a unit in the last place, less one bit unless the last kept bit is odd. The carry into the exponent
    // is what rounds up to the next power of two, and the largest floats up to infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // Dropping the low half of a NaN could leave an infinity, so the quiet bit is set.
    let quiet = bits | 0x0040_0000;
    ((if is_nan { quiet } else { rounded }) >> 16) as u16
}

fn float32_to_bfloat16(input: &[f32], output: &mut [u16]) {
    for (out, value) in output.iter_mut().zip(input) {
        *out = round_to_bfloat16(*value);
    }
}

fn bfloat16_to_float32(input: &[u16], output: &mut [f32]) {
    for (out, bits) in output.iter_mut().zip(input) {
        *out = f32::from_bits(u32::from(*bits) << 16);
    }
}

fn float32_to_float16(input: &[f32], output: &mut [u16]) {
    half::slice::HalfBitsSliceExt::reinterpret_cast_mut::<f16>(output).convert_from_f32_slice(input);
}

fn float16_to_float32(input: &[u16], output: &mut [f32]) {
    half::slice::HalfBitsSliceExt::reinterpret_cast::<f16>(input).convert_to_f32_slice(output);
}

fn uint8_to_float32(input: &[u8], output: &mut [f32]) {
    for (out, value) in output.iter_mut().zip(input) {
        *out = f32::from(*value);
    }
}

/// Exact: 8 bits fit the significand of a bfloat16.
fn uint8_to_bfloat16(input: &[u8], output: &mut [u16]) {
    for (out, value) in output.iter_mut().zip(input) {
        *out = (f32::from(*value).to_bits() >> 16) as u16;
    }
}

/// Exact: 8 bits fit the significand of a float16. A float32 of such a number has zeros below the ten bits of
/// significand that a float16 has, so that only the exponent's bias differs; zero has no bias to change.
fn uint8_to_float16(input: &[u8], output: &mut [u16]) {
    const BIAS_DIFFERENCE: u32 = (127 - 15) << 10;
    for (out, value) in output.iter_mut().zip(input) {
        let bits = f32::from(*value).to_bits() >> 13;
        *out = if *value == 0 { 0 } else { (bits - BIAS_DIFFERENCE) as u16 };
    }
}

#[cfg(test)]
mod tests;
