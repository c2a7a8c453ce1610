//! Every cast against an oracle that knows only what a float is: it decodes bit patterns to f64 from sign, exponent and
//! significand, and finds the nearest pattern by bisection.

use super::*;
use proptest::prelude::*;

/// A binary float of 16 bits.
#[derive(Clone, Copy)]
struct Format {
    exponent_bits: u32,
    significand_bits: u32,
}

const BFLOAT16: Format = Format { exponent_bits: 8, significand_bits: 7 };
const FLOAT16: Format = Format { exponent_bits: 5, significand_bits: 10 };

impl Format {
    const fn infinity(self) -> u16 {
        ((1 << self.exponent_bits) - 1) << self.significand_bits
    }

    /// The value of a pattern without its sign. Infinity decodes to the power of two that would come next, which is
    /// where rounding to it begins to be nearest.
    fn magnitude(self, bits: u16) -> f64 {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        let exponent = i32::from(bits >> self.significand_bits);
        let fraction = f64::from(bits & ((1 << self.significand_bits) - 1));
        let unit = 2_f64.powi(-(self.significand_bits as i32));
        if exponent == 0 {
            fraction * unit * 2_f64.powi(1 - bias)
        } else {
            fraction.mul_add(unit, 1.0) * 2_f64.powi(exponent - bias)
        }
    }

    fn decode(self, bits: u16) -> f32 {
        let magnitude = match bits & 0x7fff {
            bits if bits > self.infinity() => f32::NAN,
            bits if bits == self.infinity() => f32::INFINITY,
            // Every finite value of these formats is a float32.
            bits => self.magnitude(bits) as f32,
        };
        magnitude.copysign(if bits >> 15 == 1 { -1.0 } else { 1.0 })
    }

    /// The nearest pattern, ties to the even one. Not for NaN.
    fn encode(self, value: f32) -> u16 {
        let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
        let magnitude = f64::from(value.abs());
        let (mut low, mut high) = (0, self.infinity());
        if magnitude >= self.magnitude(high) {
            return sign | high;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.magnitude(middle) <= magnitude { low = middle } else { high = middle }
        }
        let (below, above) = (magnitude - self.magnitude(low), self.magnitude(high) - magnitude);
        let is_up = below > above || (below == above && low % 2 == 1);
        sign | if is_up { high } else { low }
    }
}

fn bytes_of<T: Plain>(numbers: &[T]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(numbers)];
    Target::from_slice(&mut bytes).store(0, numbers);
    bytes
}

/// The cast of these numbers, at odd addresses and by several threads.
fn cast_of<S: Plain, D: Plain>(kind: Cast, numbers: &[S]) -> Vec<D> {
    let source = [&[0xaa], &bytes_of(numbers)[..]].concat();
    let mut target = vec![0xbb; 1 + numbers.len() * size_of::<D>() + 1];
    let (src_end, dst_end) = (source.len(), target.len() - 1);
    let inner = Target::from_slice(&mut target).slice(1..dst_end);
    cast(kind, Source::from_slice(&source).slice(1..src_end), inner, NonZeroUsize::new(3).unwrap()).unwrap();
    assert_eq!((target[0], target[dst_end]), (0xbb, 0xbb), "bytes beside the target");
    let mut out = vec![D::default(); numbers.len()];
    Source::from_slice(&target).load(1, &mut out);
    out
}

fn check_narrowing(kind: Cast, format: Format, values: &[f32]) {
    let out: Vec<u16> = cast_of(kind, values);
    for (value, bits) in values.iter().zip(out) {
        if value.is_nan() {
            assert!(bits & 0x7fff > format.infinity(), "NaN {:#010x} became {bits:#06x}", value.to_bits());
            assert_eq!(bits >> 15 == 1, value.is_sign_negative(), "sign of NaN {:#010x}", value.to_bits());
        } else {
            assert_eq!(bits, format.encode(*value), "{value:e} = {:#010x}", value.to_bits());
        }
    }
}

fn check_widening(kind: Cast, format: Format) {
    let patterns: Vec<u16> = (0..=u16::MAX).collect();
    let out: Vec<f32> = cast_of(kind, &patterns);
    for (bits, value) in patterns.into_iter().zip(out) {
        let wanted = format.decode(bits);
        if wanted.is_nan() {
            assert!(value.is_nan() && value.is_sign_negative() == wanted.is_sign_negative(), "{bits:#06x}");
        } else {
            assert_eq!(value.to_bits(), wanted.to_bits(), "{bits:#06x}");
        }
    }
}

/// Around every 16-bit value: itself, the ties beside it, and one bit to each side of those.
fn neighbourhood(format: Format) -> Vec<f32> {
    let mut values = Vec::new();
    for bits in (0..=u16::MAX).step_by(7).chain(format.infinity() - 3..=format.infinity()) {
        let centre = format.decode(bits).to_bits();
        for distance in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
            values.push(f32::from_bits(centre.wrapping_add(distance)));
            values.push(f32::from_bits(centre.wrapping_sub(distance)));
        }
    }
    values
}

const SPECIAL: [u32; 22] = [
    0,
    0x8000_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffc0_0000, // zeros, infinities, quiet NaNs
    0x7f80_0001,
    0xff80_0001,
    0x7f80_ffff,
    0x7fff_ffff,
    0xffff_ffff, // NaNs whose payload is in the low half, or full
    1,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000, // float32's subnormals and the first normal
    0x7f7f_ffff,
    0x7f7f_8000,
    0x7f7f_7fff, // largest, and the tie between bfloat16's largest and infinity
    0x477f_e000,
    0x477f_efff,
    0x477f_f000,
    0x3300_0000, // 65504, the last below 65520, 65520, float16's tie with zero
];

#[test]
fn special_values_narrow_right() {
    let values = SPECIAL.map(f32::from_bits);
    check_narrowing(Cast::Float32ToBfloat16, BFLOAT16, &values);
    check_narrowing(Cast::Float32ToFloat16, FLOAT16, &values);
    let to_float16: Vec<u16> = cast_of(Cast::Float32ToFloat16, &[65504.0_f32, 65519.996, 65520.0, 5.96e-8, 1e-10]);
    assert_eq!(to_float16, [0x7bff, 0x7bff, 0x7c00, 0x0001, 0x0000]);
    let to_bfloat16: Vec<u16> = cast_of(Cast::Float32ToBfloat16, &[1.0_f32, f32::MAX, 1.003_906_2, 1.011_718_8, -0.0]);
    assert_eq!(to_bfloat16, [0x3f80, 0x7f80, 0x3f80, 0x3f82, 0x8000]);
}

#[test]
fn ties_and_their_neighbours_narrow_right() {
    check_narrowing(Cast::Float32ToBfloat16, BFLOAT16, &neighbourhood(BFLOAT16));
    check_narrowing(Cast::Float32ToFloat16, FLOAT16, &neighbourhood(FLOAT16));
}

#[test]
fn every_16_bit_pattern_widens_right() {
    check_widening(Cast::Bfloat16ToFloat32, BFLOAT16);
    check_widening(Cast::Float16ToFloat32, FLOAT16);
}

#[test]
fn every_byte_becomes_its_number() {
    let bytes: Vec<u8> = (0..=255).collect();
    let values: Vec<f32> = bytes.iter().map(|byte| f32::from(*byte)).collect();
    assert_eq!(cast_of::<u8, f32>(Cast::Uint8ToFloat32, &bytes), values);
    for (kind, format) in [(Cast::Uint8ToBfloat16, BFLOAT16), (Cast::Uint8ToFloat16, FLOAT16)] {
        let wanted: Vec<u16> = values.iter().map(|value| format.encode(*value)).collect();
        assert_eq!(cast_of::<u8, u16>(kind, &bytes), wanted);
    }
}

#[test]
fn every_element_count_around_a_block_and_a_step_is_whole() {
    for elements in [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, (1 << 19) - 1, (1 << 19) + 1] {
        let values: Vec<f32> = (0..elements).map(|at| at as f32).collect();
        let narrow: Vec<u16> = cast_of(Cast::Float32ToBfloat16, &values);
        let wanted: Vec<u16> = values.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        assert!(narrow == wanted, "{elements} elements");
    }
}

#[test]
fn wrong_lengths_are_refused_with_the_numbers() {
    let source = [0_u8; 8];
    let mut target = [0_u8; 5];
    let one = NonZeroUsize::MIN;
    let kind = Cast::Float32ToBfloat16;
    assert_eq!(
        cast(kind, Source::from_slice(&source), Target::from_slice(&mut target), one),
        Err(Error::Lengths { src_nbytes: 8, dst_nbytes: 5, wanted_nbytes: 4 })
    );
    assert_eq!(
        cast(kind, Source::from_slice(&source[..7]), Target::from_slice(&mut target), one),
        Err(Error::PartialElement { nbytes: 7, dtype: "float32", itemsize: 4 })
    );
}

#[test]
#[allow(unsafe_code)]
fn a_cast_onto_its_input_is_refused() {
    let mut bytes = [0_u8; 16];
    let all = Target::from_slice(&mut bytes);
    // SAFETY: the same bytes, of which no reference is used while the views are.
    let source = unsafe { Source::from_raw(all.as_mut_ptr(), 8) };
    assert_eq!(
        cast(Cast::Float32ToBfloat16, source, all.slice(4..8), NonZeroUsize::MIN),
        Err(Error::Overlap { src_nbytes: 8, dst_nbytes: 4 })
    );
}

#[test]
fn pairs_outside_the_table_are_refused_with_the_table() {
    for from in Dtype::ALL {
        for to in Dtype::ALL {
            let is_known = Cast::ALL.iter().any(|cast| cast.from() == from && cast.to() == to);
            match Cast::between(from, to) {
                Ok(cast) => assert!(is_known && cast.from() == from && cast.to() == to),
                Err(error) => {
                    assert!(!is_known);
                    assert!(error.to_string().contains("float32 to bfloat16"), "{error}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bits_narrow_right(bits in prop::collection::vec(any::<u32>(), 0..1200)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        check_narrowing(Cast::Float32ToBfloat16, BFLOAT16, &values);
        check_narrowing(Cast::Float32ToFloat16, FLOAT16, &values);
    }

    /// Most random patterns overflow or vanish in float16; these are in its range.
    #[test]
    fn any_value_near_float16_narrows_right(values in prop::collection::vec(-70000_f32..70000.0, 1..300), shift in 0_i32..30) {
        let scaled: Vec<f32> = values.into_iter().map(|value| value * 2_f32.powi(-shift)).collect();
        check_narrowing(Cast::Float32ToFloat16, FLOAT16, &scaled);
    }
}
