//! Frames: fixed, little-endian, one a datagram. Every length is bounded and every byte accounted for.
//!
//! ```text
//! 0  "mmcp"
//! 4  u16 version
//! 6  u16 kind
//! 8  u64 sequence: an answer repeats that of its question
//! 16 body
//!
//! 1 Hello       u64 instance
//! 2 Probe       u64 offset, u32 nbytes, text name
//! 3 ProbeReply  i32 errno, u16 n, n bytes (errno 0: the bytes read; else the reason)
//! 4 Offer       u64 instance, u64 data_nbytes, u64 control_nbytes, u32 num_leases, u32 slot; four descriptors:
//!               data, control, flags, the end of a pipe
//! 5 Accepted    u64 instance
//! 6 Refused     i32 errno, text reason
//!
//! text: u16 nbytes, UTF-8
//! ```

use super::EndpointError;

/// No frame is longer.
pub(super) const MAX_FRAME_BYTES: usize = 2048;
/// Bytes that one probe reads at most.
pub const MAX_PROBE_BYTES: usize = 64;
/// Bytes of a text at most; longer ones are cut.
pub const MAX_TEXT_BYTES: usize = 1024;

const MAGIC: [u8; 4] = *b"mmcp";
const VERSION: u16 = 1;

/// An arena as it is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) instance: u64,
    pub(crate) data_nbytes: u64,
    pub(crate) control_nbytes: u64,
    pub(crate) num_leases: u32,
    pub(crate) slot: u32,
}

/// What a frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello { instance: u64 },
    Probe { name: String, offset: u64, nbytes: u32 },
    ProbeRead { bytes: Vec<u8> },
    ProbeFailed { errno: i32, reason: String },
    Offer(Offer),
    Accepted { instance: u64 },
    Refused { errno: i32, reason: String },
}

impl Message {
    pub(crate) const fn kind_name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "Hello",
            Self::Probe { .. } => "Probe",
            Self::ProbeRead { .. } | Self::ProbeFailed { .. } => "ProbeReply",
            Self::Offer(_) => "Offer",
            Self::Accepted { .. } => "Accepted",
            Self::Refused { .. } => "Refused",
        }
    }

    /// Descriptors that travel with it.
    pub(crate) const fn num_descriptors(&self) -> usize {
        if matches!(self, Self::Offer(_)) { 4 } else { 0 }
    }

    pub(super) fn encode(&self, sequence: u64) -> Vec<u8> {
        let kind: u16 = match self {
            Self::Hello { .. } => 1,
            Self::Probe { .. } => 2,
            Self::ProbeRead { .. } | Self::ProbeFailed { .. } => 3,
            Self::Offer(_) => 4,
            Self::Accepted { .. } => 5,
            Self::Refused { .. } => 6,
        };
        let mut frame = Vec::with_capacity(64);
        frame.extend(MAGIC);
        frame.extend(VERSION.to_le_bytes());
        frame.extend(kind.to_le_bytes());
        frame.extend(sequence.to_le_bytes());
        match self {
            Self::Hello { instance } | Self::Accepted { instance } => frame.extend(instance.to_le_bytes()),
            Self::Probe { name, offset, nbytes } => {
                frame.extend(offset.to_le_bytes());
                frame.extend(nbytes.to_le_bytes());
                put_text(&mut frame, name);
            }
            Self::ProbeRead { bytes } => {
                frame.extend(0_i32.to_le_bytes());
                put_bytes(&mut frame, &bytes[..bytes.len().min(MAX_PROBE_BYTES)]);
            }
            Self::ProbeFailed { errno, reason } | Self::Refused { errno, reason } => {
                // 0 would say that it went well.
                let errno = if *errno == 0 && kind == 3 { -1 } else { *errno };
                frame.extend(errno.to_le_bytes());
                put_text(&mut frame, reason);
            }
            Self::Offer(offer) => {
                frame.extend(offer.instance.to_le_bytes());
                frame.extend(offer.data_nbytes.to_le_bytes());
                frame.extend(offer.control_nbytes.to_le_bytes());
                frame.extend(offer.num_leases.to_le_bytes());
                frame.extend(offer.slot.to_le_bytes());
            }
        }
        frame
    }

    /// The message and its sequence number.
    pub(super) fn decode(frame: &[u8]) -> Result<(Self, u64), EndpointError> {
        let mut rest = Rest { frame, at: 0 };
        let magic: [u8; 4] = rest.array("magic")?;
        if magic != MAGIC {
            return Err(rest.refused(format!("a frame begins with {magic:02x?}, {MAGIC:02x?} wanted")));
        }
        let version = u16::from_le_bytes(rest.array("version")?);
        if version != VERSION {
            return Err(rest.refused(format!("the peer speaks version {version}, we speak {VERSION}")));
        }
        let kind = u16::from_le_bytes(rest.array("kind")?);
        let sequence = rest.number("sequence")?;
        let message = match kind {
            1 => Self::Hello { instance: rest.number("instance")? },
            2 => {
                let offset = rest.number("offset")?;
                let nbytes = u32::from_le_bytes(rest.array("nbytes")?);
                if nbytes as usize > MAX_PROBE_BYTES {
                    return Err(rest.refused(format!("a probe of {nbytes} bytes, at most {MAX_PROBE_BYTES} are read")));
                }
                Self::Probe { name: rest.text("name")?, offset, nbytes }
            }
            3 => match i32::from_le_bytes(rest.array("errno")?) {
                0 => Self::ProbeRead { bytes: rest.bytes("bytes", MAX_PROBE_BYTES)?.to_vec() },
                errno => Self::ProbeFailed { errno, reason: rest.text("reason")? },
            },
            4 => Self::Offer(Offer {
                instance: rest.number("instance")?,
                data_nbytes: rest.number("data_nbytes")?,
                control_nbytes: rest.number("control_nbytes")?,
                num_leases: u32::from_le_bytes(rest.array("num_leases")?),
                slot: u32::from_le_bytes(rest.array("slot")?),
            }),
            5 => Self::Accepted { instance: rest.number("instance")? },
            6 => Self::Refused { errno: i32::from_le_bytes(rest.array("errno")?), reason: rest.text("reason")? },
            _ => return Err(rest.refused(format!("a frame of unknown kind {kind}"))),
        };
        let over = frame.len() - rest.at;
        if over > 0 {
            return Err(rest.refused(format!(
                "{} of {} bytes with {over} bytes too many",
                message.kind_name(),
                frame.len()
            )));
        }
        Ok((message, sequence))
    }
}

/// At most [`MAX_TEXT_BYTES`] of it, whole characters.
pub(super) fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn put_text(frame: &mut Vec<u8>, text: &str) {
    put_bytes(frame, cut(text).as_bytes());
}

fn put_bytes(frame: &mut Vec<u8>, bytes: &[u8]) {
    // No loss: the callers' bounds are below 2**16.
    frame.extend((bytes.len() as u16).to_le_bytes());
    frame.extend(bytes);
}

struct Rest<'a> {
    frame: &'a [u8],
    at: usize,
}

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], EndpointError> {
        let taken = self.frame.get(self.at..self.at + count);
        let taken = taken.ok_or_else(|| {
            self.refused(format!("a frame of {} bytes ends within {what}, at byte {}", self.frame.len(), self.at))
        })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], EndpointError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    fn number(&mut self, what: &str) -> Result<u64, EndpointError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn bytes(&mut self, what: &str, most: usize) -> Result<&'a [u8], EndpointError> {
        let count = usize::from(u16::from_le_bytes(self.array(what)?));
        if count > most {
            return Err(self.refused(format!("{what} of {count} bytes, at most {most} allowed")));
        }
        self.take(count, what)
    }

    fn text(&mut self, what: &str) -> Result<String, EndpointError> {
        let bytes = self.bytes(what, MAX_TEXT_BYTES)?;
        let text = std::str::from_utf8(bytes).map_err(|_| self.refused(format!("{what} is not UTF-8")))?;
        Ok(text.to_owned())
    }

    fn refused(&self, reason: String) -> EndpointError {
        EndpointError::Protocol { reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn examples() -> Vec<Message> {
        vec![
            Message::Hello { instance: 0x0123_4567_89ab_cdef },
            Message::Probe { name: "mmcopy-x".to_owned(), offset: u64::MAX, nbytes: 32 },
            Message::ProbeRead { bytes: (0..64).collect() },
            Message::ProbeFailed { errno: 13, reason: "owner uid 0, mode 0600".to_owned() },
            Message::Offer(Offer { instance: 1, data_nbytes: 2, control_nbytes: 3, num_leases: 4, slot: 5 }),
            Message::Accepted { instance: 7 },
            Message::Refused { errno: 0, reason: "\u{e9}".to_owned() },
        ]
    }

    #[test]
    fn every_message_comes_back() {
        for message in examples() {
            let frame = message.encode(77);
            assert!(frame.len() <= MAX_FRAME_BYTES);
            assert_eq!(Message::decode(&frame), Ok((message, 77)));
        }
    }

    #[test]
    fn the_bytes_of_a_hello() {
        let frame = Message::Hello { instance: 0x0123_4567_89ab_cdef }.encode(1);
        assert_eq!(frame, *b"mmcp\x01\0\x01\0\x01\0\0\0\0\0\0\0\xef\xcd\xab\x89\x67\x45\x23\x01");
    }

    #[test]
    fn a_frame_cut_or_lengthened_anywhere_is_refused() {
        for message in examples() {
            let frame = message.encode(0);
            for end in 0..frame.len() {
                assert!(
                    matches!(Message::decode(&frame[..end]), Err(EndpointError::Protocol { .. })),
                    "{message:?} {end}"
                );
            }
            let longer = [frame.as_slice(), &[0]].concat();
            let Err(EndpointError::Protocol { reason }) = Message::decode(&longer) else { panic!("{message:?}") };
            assert!(reason.contains("1 bytes too many"), "{reason}");
        }
    }

    #[test]
    fn what_is_refused_says_its_numbers() {
        let mut frame = Message::Hello { instance: 1 }.encode(0);
        let refused = |frame: &[u8], wanted: &str| {
            let Err(EndpointError::Protocol { reason }) = Message::decode(frame) else { panic!("{wanted}") };
            assert!(reason.contains(wanted), "{reason}");
        };
        frame[4] = 2;
        refused(&frame, "version 2, we speak 1");
        frame[4] = 1;
        frame[6] = 99;
        refused(&frame, "unknown kind 99");
        frame[0] = b'x';
        refused(&frame, "begins with");
        let mut probe = Message::Probe { name: "a".to_owned(), offset: 0, nbytes: 1 }.encode(0);
        probe[24..28].copy_from_slice(&65_u32.to_le_bytes());
        refused(&probe, "65 bytes, at most 64");
        let mut text = Message::Refused { errno: 1, reason: "a".to_owned() }.encode(0);
        text[20..22].copy_from_slice(&1025_u16.to_le_bytes());
        refused(&text, "reason of 1025 bytes, at most 1024");
        text[20..22].copy_from_slice(&1_u16.to_le_bytes());
        text[22] = 0xff;
        refused(&text, "not UTF-8");
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let frame = Message::Refused { errno: 1, reason: "\u{20ac}".repeat(2000) }.encode(0);
        let (Message::Refused { reason, .. }, 0) = Message::decode(&frame).unwrap() else { panic!() };
        assert_eq!(reason, "\u{20ac}".repeat(MAX_TEXT_BYTES / 3));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_that_encodes_to_them_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok((message, sequence)) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(sequence), bytes);
            }
        }

        #[test]
        fn a_mutated_frame_never_panics(which in 0_usize..7, at in 0_usize..64, value in any::<u8>()) {
            let mut frame = examples()[which].encode(3);
            let at = at % frame.len();
            frame[at] = value;
            if let Ok((message, sequence)) = Message::decode(&frame) {
                prop_assert_eq!(message.encode(sequence), frame);
            }
        }
    }
}
