//! The consumer's side: an arena that a sender handed over.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::blocks::MOST_DATA_BYTES;
use super::error::ArenaError;
use super::handle::LeaseHandle;
use super::layout::{self, Header, MOST_LEASES};
use super::mapping::{Access, Mapping};
use super::memfd;
use super::record::{self, Written};
use super::table::MAX_CONSUMERS;
use crate::endpoint::Offer;
use crate::entry::Identity;
use crate::fork::{Descriptor, Process};
use crate::memory::Source;
use crate::{Error, Result};

/// How long to look at a watermark before sleeping.
const SPIN: Duration = Duration::from_micros(50);
const SHORT_SLEEP: Duration = Duration::from_micros(20);
const LONG_SLEEP: Duration = Duration::from_millis(1);
/// Pause between two questions whether the wait is to go on.
const ASK_PAUSE: Duration = Duration::from_millis(50);
/// Pauses between two looks at the clock.
const SPINS_A_LOOK: usize = 64;

/// A sender's arena, mapped. It stays readable after the sender's end.
#[derive(Debug)]
pub struct Map {
    instance: u64,
    files: [Identity; 2],
    slot: u32,
    num_leases: u32,
    is_read_only: bool,
    data: Mapping,
    control: Mapping,
    flags: Mapping,
    is_owner_gone: AtomicBool,
    held: Mutex<HashMap<u32, (u64, Holding)>>,
    process: Process,
    /// While this is open the sender gives none of our leases to anyone else.
    _alive: Descriptor,
}

/// A lease that we may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    handle: LeaseHandle,
}

/// What has become of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holding {
    Held,
    /// Another party, such as a GPU's stream, writes the flag.
    HandedOn,
    Released,
}

/// The word that tells the sender that we are done, for those who write it from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// Its address in this process.
    pub address: usize,
    /// Its offset in the mapping of all flags.
    pub offset: usize,
    /// What to write.
    pub value: u32,
}

impl Map {
    /// Maps what was offered: data, control, flags, and the end of a pipe. Everything is checked: seals, sizes, the
    /// header.
    pub(crate) fn new(offer: Offer, descriptors: Vec<OwnedFd>) -> std::result::Result<Self, ArenaError> {
        let refused = |reason: String| ArenaError::Offered { reason };
        let count = descriptors.len();
        let Ok([data, control, flags, alive]) = <[OwnedFd; 4]>::try_from(descriptors) else {
            return Err(refused(format!("it has {count} descriptors, 4 wanted")));
        };
        let Offer { instance, data_nbytes, control_nbytes, num_leases, slot } = offer;
        if !(1..=MOST_LEASES).contains(&num_leases) || slot as usize >= MAX_CONSUMERS {
            return Err(refused(format!("{num_leases} leases and consumer {slot} are not possible")));
        }
        let wanted_control = layout::control_nbytes(num_leases) as u64;
        if !(1..=MOST_DATA_BYTES).contains(&data_nbytes) || control_nbytes != wanted_control {
            let reason = format!(
                "{data_nbytes} bytes of data and {control_nbytes} of control are not possible; {wanted_control} of control belong to {num_leases} leases"
            );
            return Err(refused(reason));
        }
        let flags_nbytes = layout::flags_nbytes(num_leases) as u64;
        let of = |name: &'static str| move |reason: String| ArenaError::Offered { reason: format!("{name}: {reason}") };
        let (is_data_read_only, data_file) = memfd::verify(&data, data_nbytes).map_err(of("data"))?;
        let (is_control_read_only, control_file) = memfd::verify(&control, control_nbytes).map_err(of("control"))?;
        memfd::verify(&flags, flags_nbytes).map_err(of("flags"))?;
        let map = |file: &OwnedFd, nbytes: u64, access: Access, name: &'static str| {
            // No loss: it was checked against MOST_DATA_BYTES, or counted from MOST_LEASES.
            Mapping::new(file, nbytes as usize, access)
                .map_err(|errno| of(name)(format!("mapping {nbytes} bytes: {errno}")))
        };
        let control = map(&control, control_nbytes, Access::Read, "control")?;
        if !(Header { num_leases, instance, data_nbytes }).is_in(control.source()) {
            return Err(refused("its header says something else than its offer".to_owned()));
        }
        Ok(Self {
            instance,
            files: [data_file, control_file],
            slot,
            num_leases,
            is_read_only: is_data_read_only && is_control_read_only,
            data: map(&data, data_nbytes, Access::Read, "data")?,
            control,
            flags: map(&flags, flags_nbytes, Access::ReadWrite, "flags")?,
            is_owner_gone: AtomicBool::new(false),
            held: Mutex::new(HashMap::new()),
            process: Process::current(),
            _alive: Descriptor::new(alive),
        })
    }

    /// The arena's random number.
    pub const fn instance(&self) -> u64 {
        self.instance
    }

    /// Whether the other is the same memory, perhaps with us as another consumer: equal numbers alone do not say so,
    /// since anyone who connects can name any number.
    pub(crate) fn is_same_memory(&self, other: &Self) -> bool {
        self.files == other.files
    }

    /// Whether a lease of this arena is for us as this consumer.
    pub(crate) fn is_for_us(&self, handle: &LeaseHandle) -> bool {
        handle.instance == self.instance
            && handle.index < self.num_leases
            && layout::record(&self.control, handle.index)
                .read(handle.generation)
                .is_some_and(|entry| entry.consumers & (1 << self.slot) != 0)
    }

    /// Our number as a consumer of this arena.
    pub const fn slot(&self) -> u32 {
        self.slot
    }

    /// Whether the kernel keeps everyone but the sender from writing to data and control.
    pub const fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Address and bytes of the data, which are mapped as long as this lives.
    pub fn data_span(&self) -> (usize, usize) {
        (self.data.address(), self.data.nbytes())
    }

    /// Address and bytes of the flags, which are mapped as long as this lives.
    pub fn flags_span(&self) -> (usize, usize) {
        (self.flags.address(), self.flags.nbytes())
    }

    /// Whether the connection to the sender has ended.
    pub fn is_owner_gone(&self) -> bool {
        self.is_owner_gone.load(Ordering::Acquire)
    }

    pub(crate) fn owner_has_gone(&self) {
        self.is_owner_gone.store(true, Ordering::Release);
    }

    /// Leases that are claimed and not released.
    pub fn num_held(&self) -> usize {
        if !self.process.is_current() {
            return 0;
        }
        self.lock().values().filter(|(_, holding)| *holding == Holding::Held).count()
    }

    /// Checks a handle and says to its sender that we read it from now on. Never blocks.
    pub fn claim(&self, handle: &LeaseHandle) -> Result<Claim> {
        self.check_process()?;
        let name = || handle.name();
        let forged = |reason: String| ArenaError::Forged { name: name(), reason };
        if handle.instance != self.instance {
            return Err(ArenaError::UnknownArena { name: name(), why: "this is another one" }.into());
        }
        if handle.index >= self.num_leases {
            return Err(forged(format!("the arena has {} leases", self.num_leases)).into());
        }
        let generation = handle.generation;
        let record = layout::record(&self.control, handle.index);
        let flags = layout::flags(&self.flags, self.num_leases, handle.index);
        let mut held = self.lock();
        match held.get(&handle.index) {
            Some((found, Holding::Held)) if *found == generation => {
                return Err(ArenaError::Repeated { name: name(), state: "still held" }.into());
            }
            Some((found, _)) if *found == generation => {
                return Err(ArenaError::Repeated { name: name(), state: "released" }.into());
            }
            _ => {}
        }
        let Some(entry) = record.read(generation) else {
            return Err(
                ArenaError::Stale { name: name(), reason: "its block is another lease's, or free".to_owned() }.into()
            );
        };
        if (entry.offset, entry.nbytes) != (handle.offset, handle.nbytes) {
            let reason = format!(
                "it names {} bytes at {}, its record {} at {}",
                handle.nbytes, handle.offset, entry.nbytes, entry.offset
            );
            return Err(forged(reason).into());
        }
        // The sender's word, too, is checked before anything is read (M2).
        if entry.offset.checked_add(entry.nbytes).is_none_or(|end| end > self.data.nbytes() as u64) {
            return Err(forged(format!("{} bytes at {} are outside the arena", entry.nbytes, entry.offset)).into());
        }
        if entry.consumers & (1 << self.slot) == 0 {
            return Err(forged(format!("it is not for consumer {}, which we are", self.slot)).into());
        }
        if !flags.claim(&record, generation, 1 << self.slot) {
            return Err(ArenaError::Stale { name: name(), reason: "its sender has taken it back".to_owned() }.into());
        }
        held.insert(handle.index, (generation, Holding::Held));
        Ok(Claim { handle: *handle })
    }

    /// The bytes of a lease. Those beyond the watermark are anything.
    pub fn source(&self, claim: &Claim) -> Source<'_> {
        // No loss: checked when it was claimed.
        let start = claim.handle.offset as usize;
        self.data.source().slice(start..start + claim.handle.nbytes as usize)
    }

    /// How far the sender has written a lease that we hold. Never blocks. An error when it has given up.
    pub fn written(&self, claim: &Claim) -> Result<u64> {
        self.check_process()?;
        let found = self.look(claim);
        if found.is_aborted { Err(self.aborted(claim, found)) } else { Ok(found.nbytes) }
    }

    /// Blocks until the sender has written `upto` bytes of a lease that we hold; how many are there, which can be more.
    /// A limit of 0 only looks. `interrupted` is asked about every 50 ms; when it says so, this ends with
    /// [`Error::Interrupted`].
    pub fn wait_written(
        &self,
        claim: &Claim,
        upto: u64,
        limit: Duration,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Result<u64> {
        self.check_process()?;
        let begun = Instant::now();
        let mut ask_at = ASK_PAUSE;
        let wanted_nbytes = upto.min(claim.handle.nbytes);
        let mut sleep = SHORT_SLEEP;
        loop {
            // Before the look at the watermark: what a sender wrote before it went is there.
            let is_owner_gone = self.is_owner_gone();
            let found = self.look(claim);
            if found.nbytes >= wanted_nbytes {
                return Ok(found.nbytes);
            }
            let (name, written_nbytes) = (claim.handle.name(), found.nbytes);
            if found.is_aborted {
                return Err(self.aborted(claim, found));
            }
            if is_owner_gone {
                let nbytes = claim.handle.nbytes;
                return Err(ArenaError::OwnerGone { name, written_nbytes, wanted_nbytes, nbytes }.into());
            }
            let waited = begun.elapsed();
            if waited >= limit {
                return Err(ArenaError::Timeout { name, written_nbytes, wanted_nbytes, waited: limit }.into());
            }
            if waited >= ask_at {
                if interrupted() {
                    return Err(Error::Interrupted { what: format!("waiting for lease {name}"), waited });
                }
                ask_at = begun.elapsed() + ASK_PAUSE;
            }
            if waited < SPIN {
                (0..SPINS_A_LOOK).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::sleep(sleep.min(limit - waited));
                sleep = (sleep * 2).min(LONG_SLEEP);
            }
        }
    }

    /// Says to the sender that our reads are over. False when it was said already, which is harmless.
    pub fn release(&self, claim: &Claim) -> Result<bool> {
        self.check_process()?;
        let is_held = self.pass(claim, Holding::Released);
        if is_held {
            layout::flags(&self.flags, self.num_leases, claim.handle.index).release(claim.handle.generation);
        }
        Ok(is_held)
    }

    /// Where to write what, so that the sender sees that our reads are over: for a GPU's stream, after its copy.
    pub fn release_flag(&self, claim: &Claim) -> Flag {
        let offset = layout::release_at(self.num_leases, claim.handle.index);
        Flag { address: self.flags.address() + offset, offset, value: record::flag_of(claim.handle.generation) }
    }

    /// Another party writes the flag, and [`Map::release`] does nothing any more. False when the lease is not held.
    pub fn defer_release(&self, claim: &Claim) -> Result<bool> {
        self.check_process()?;
        Ok(self.pass(claim, Holding::HandedOn))
    }

    fn pass(&self, claim: &Claim, to: Holding) -> bool {
        let mut held = self.lock();
        match held.get_mut(&claim.handle.index) {
            Some((generation, holding)) if *generation == claim.handle.generation && *holding == Holding::Held => {
                *holding = to;
                true
            }
            _ => false,
        }
    }

    /// The watermark, never beyond the lease, whatever the sender wrote there.
    fn look(&self, claim: &Claim) -> Written {
        let found = layout::record(&self.control, claim.handle.index).written();
        Written { nbytes: found.nbytes.min(claim.handle.nbytes), ..found }
    }

    fn aborted(&self, claim: &Claim, found: Written) -> Error {
        let (name, nbytes) = (claim.handle.name(), claim.handle.nbytes);
        ArenaError::Aborted { name, written_nbytes: found.nbytes, nbytes }.into()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, (u64, Holding)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error in a forked child: what it reads there is not the arena.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() {
            Ok(())
        } else {
            Err(Error::Closed { what: format!("arena {:016x}", self.instance) })
        }
    }
}

impl Claim {
    /// The handle that was claimed.
    pub const fn handle(&self) -> &LeaseHandle {
        &self.handle
    }

    /// First byte in the arena's data.
    pub const fn offset(&self) -> u64 {
        self.handle.offset
    }

    /// Bytes.
    pub const fn nbytes(&self) -> u64 {
        self.handle.nbytes
    }
}
