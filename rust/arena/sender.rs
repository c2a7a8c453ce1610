//! The sender's side: the arena, its consumers, and the thread that gives blocks back.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::blocks::MOST_DATA_BYTES;
use super::consumer::Consumer;
use super::error::ArenaError;
use super::handle::LeaseHandle;
use super::layout::{self, Header, MOST_LEASES};
use super::mapping::Mapping;
use super::reclaim::slots_of;
use super::table::{MAX_CONSUMERS, Table};
use super::writing::Writing;
use super::{HugePages, Options, Report, Statistics, budget, memfd};
use crate::endpoint::{Offer, SenderLink};
use crate::fork::{Descriptor, Process};
use crate::{Error, Result, owner};

/// An arena: one a sender, for all its workers. Dropping it closes it; the memory goes with the last mapping, here or in
/// a worker.
#[derive(Debug)]
pub struct Arena {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the arena's handles share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) instance: u64,
    pub(super) data: Mapping,
    pub(super) control: Mapping,
    pub(super) num_leases: u32,
    pub(super) unclaimed_limit: Duration,
    /// Bytes of the largest group that an empty arena finds a block for.
    most_nbytes: u64,
    report: Report,
    state: Mutex<State>,
    pub(super) freed: Condvar,
    pub(super) work: Condvar,
    pub(super) process: Process,
}

#[derive(Debug)]
struct Files {
    data: Descriptor,
    control: Descriptor,
}

/// What the books say, and who waits.
#[derive(Debug)]
pub(super) struct State {
    pub(super) table: Table,
    /// What is handed over, until it is closed.
    files: Option<Arc<Files>>,
    pub(super) consumers: [Option<Consumer>; MAX_CONSUMERS],
    /// Slots of hand-overs that are under way.
    offered: u32,
    pub(super) asked_alive: Instant,
    pub(super) num_waiting: usize,
    pub(super) is_parked: bool,
    pub(super) is_closing: bool,
    pub(super) has_ended: bool,
    pub(super) counters: Statistics,
}

impl Arena {
    /// Makes the memory: reserved, touched by several threads, sealed. Blocks, about a second for 4 GiB.
    pub fn create(options: &Options) -> Result<Self> {
        let process = Process::current();
        let (data_nbytes, num_leases) = checked(options)?;
        let wanted_nbytes = data_nbytes as u64 + layout::control_nbytes(num_leases) as u64;
        if options.huge_pages != HugePages::Reserved {
            budget::check(wanted_nbytes, budget::MemoryBudget::read(Path::new("/proc")).available.as_ref())?;
        }
        let failed = |errno: rustix::io::Errno| ArenaError::Io {
            operation: "getrandom",
            errno: errno.raw_os_error(),
            nbytes: 8,
        };
        let instance = owner::random_bits().map_err(failed)?;
        let (data_file, data, report) = memfd::data(data_nbytes, options.huge_pages, options.num_threads.get())?;
        let header = Header { num_leases, instance, data_nbytes: data_nbytes as u64 };
        let (control_file, control) =
            memfd::control(layout::control_nbytes(num_leases), |control| header.write(control))?;
        let table = Table::new(data_nbytes, num_leases);
        let inner = Arc::new(Inner {
            instance,
            data,
            control,
            num_leases,
            unclaimed_limit: options.unclaimed_limit,
            most_nbytes: table.largest_nbytes(),
            report,
            state: Mutex::new(State {
                table,
                files: Some(Arc::new(Files { data: data_file, control: control_file })),
                consumers: [const { None }; MAX_CONSUMERS],
                offered: 0,
                asked_alive: Instant::now(),
                num_waiting: 0,
                is_parked: false,
                is_closing: false,
                has_ended: false,
                counters: Statistics::default(),
            }),
            freed: Condvar::new(),
            work: Condvar::new(),
            process,
        });
        let working = Arc::clone(&inner);
        let started = Builder::new().name("mmcopy-arena".to_owned()).spawn(move || working.give_back());
        let thread = started.map_err(|error| Error::Spawn { thread: 0, num_threads: 1, reason: error.to_string() })?;
        Ok(Self { inner, thread: Mutex::new(Some(thread)) })
    }

    /// A random number that no other arena has.
    pub fn instance(&self) -> u64 {
        self.inner.instance
    }

    /// Bytes of the data.
    pub fn data_nbytes(&self) -> usize {
        self.inner.data.nbytes()
    }

    /// How the memory was made, and what the system refused.
    pub fn report(&self) -> &Report {
        &self.inner.report
    }

    /// Gives the arena to the worker at the other end of the link; the number that it has as a consumer from now on.
    /// Blocks until the worker has mapped it. Keep the link open as long as the worker shall receive leases: for the worker
    /// its end is ours. A worker that refuses it keeps its link; after any other error that is closed, so that both sides
    /// start anew.
    pub fn hand_over(&self, link: &SenderLink, limit: Duration) -> Result<u32> {
        let inner = &self.inner;
        let (consumer, passed) = Consumer::new(inner.num_leases)?;
        let (slot, files) = {
            let mut state = inner.open()?;
            inner.sweep(&mut state, true);
            let is_free = |slot: &usize| state.consumers[*slot].is_none() && state.offered & (1 << slot) == 0;
            let slot = (0..MAX_CONSUMERS).find(is_free).ok_or(ArenaError::Consumers { most: MAX_CONSUMERS })?;
            let files = state.files.clone().ok_or_else(|| inner.closed())?;
            state.offered |= 1 << slot;
            (slot, files)
        };
        let offer = Offer {
            instance: inner.instance,
            data_nbytes: inner.data.nbytes() as u64,
            control_nbytes: inner.control.nbytes() as u64,
            num_leases: inner.num_leases,
            slot: slot as u32,
        };
        let descriptors = [files.data.as_fd(), files.control.as_fd(), passed.flags.as_fd(), passed.alive.as_fd()];
        let outcome = link.offer(offer, &descriptors, limit);
        let mut state = inner.lock();
        state.offered &= !(1 << slot);
        if let Err(error) = outcome {
            if !matches!(error, Error::Endpoint(crate::endpoint::EndpointError::Refused { .. })) {
                link.close();
            }
            return Err(error);
        }
        if state.is_closing {
            return Err(inner.closed());
        }
        state.consumers[slot] = Some(consumer);
        state.counters.consumers_connected += 1;
        Ok(slot as u32)
    }

    /// Leases of these sizes, side by side in their order and each at a multiple of 256 bytes, for these consumers; all or
    /// none. Blocks for `wait` at most until there is room, and none of the consumers holds more than its share.
    pub fn take(&self, sizes: &[usize], consumers: &[u32], wait: Duration) -> Result<Vec<Writing>> {
        let begun = Instant::now();
        loop {
            if let Some(taken) = self.take_within(sizes, consumers, begun, wait, Duration::MAX)? {
                return Ok(taken);
            }
        }
    }

    /// As [`Arena::take`] for a wait that began at `begun`, but None when there is no room after `pause` either: for callers
    /// that look at other things meanwhile. With a pause of zero it never blocks.
    pub fn take_within(
        &self,
        sizes: &[usize],
        consumers: &[u32],
        begun: Instant,
        wait: Duration,
        pause: Duration,
    ) -> Result<Option<Vec<Writing>>> {
        let inner = &self.inner;
        let paused = Instant::now();
        let mut state = inner.open()?;
        let group_nbytes = Table::group_nbytes(sizes);
        let fits = group_nbytes.is_some_and(|nbytes| nbytes as u64 <= inner.most_nbytes)
            && sizes.len() <= inner.num_leases as usize;
        loop {
            let mask = state.mask_of(consumers)?;
            if let Some(taken) = inner.take_now(&mut state, sizes, mask) {
                drop(state);
                return Ok(Some(taken.into_iter().map(|handle| Writing::new(Arc::clone(inner), handle)).collect()));
            }
            let was_over = state.over_share(sizes, mask).is_some();
            let is_freed = inner.sweep(&mut state, false) > 0;
            if is_freed {
                inner.freed.notify_all();
            }
            if is_freed || was_over && state.over_share(sizes, mask).is_none() {
                continue;
            }
            let left = wait.saturating_sub(begun.elapsed());
            if left.is_zero() || !fits {
                state.counters.full += 1;
                let free_nbytes = inner.data.nbytes() as u64 - state.table.used_nbytes();
                if fits && let Some((slot, held_nbytes)) = state.over_share(sizes, mask) {
                    let wanted_nbytes = group_nbytes.unwrap_or(usize::MAX) as u64;
                    let data_nbytes = inner.data.nbytes() as u64;
                    let fault =
                        ArenaError::Share { slot, wanted_nbytes, waited: wait, held_nbytes, free_nbytes, data_nbytes };
                    return Err(fault.into());
                }
                return Err(ArenaError::Full {
                    wanted_nbytes: group_nbytes.map_or(u64::MAX, |nbytes| nbytes as u64),
                    num_leases: sizes.len(),
                    waited: if fits { wait } else { Duration::ZERO },
                    free_nbytes,
                    data_nbytes: inner.data.nbytes() as u64,
                    largest_nbytes: state.table.largest_nbytes(),
                    free_leases: state.table.num_free(),
                }
                .into());
            }
            let left = left.min(pause.saturating_sub(paused.elapsed()));
            if left.is_zero() {
                return Ok(None);
            }
            state.num_waiting += 1;
            inner.work.notify_all();
            state = inner.freed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.num_waiting -= 1;
            if state.is_closing {
                return Err(inner.closed());
            }
        }
    }

    /// Takes a lease back that was handed out: a consumer that has not begun to read it cannot any more, and the block
    /// comes back when those that have are done, and the writer, if it is still being written: its handle can be out
    /// already. False when it is over already.
    pub fn cancel(&self, handle: &LeaseHandle) -> Result<bool> {
        let inner = &self.inner;
        let mut state = inner.open()?;
        if handle.instance != inner.instance {
            return Err(ArenaError::UnknownArena { name: handle.name(), why: "this is another one" }.into());
        }
        let State { table, consumers, counters, .. } = &mut *state;
        let Some(lease) = table.get_mut(handle.index, handle.generation) else {
            return Ok(false);
        };
        if !lease.is_cancelled {
            counters.cancelled += 1;
            inner.cancel_lease(consumers, handle.index, lease);
        }
        if inner.sweep(&mut state, false) > 0 {
            inner.freed.notify_all();
        }
        Ok(true)
    }

    /// What has happened so far, and what is out now. Looks at the flags, and whether the consumers live.
    pub fn statistics(&self) -> Result<Statistics> {
        if !self.inner.process.is_current() {
            return Err(self.inner.closed());
        }
        let mut state = self.inner.lock();
        if self.inner.sweep(&mut state, true) > 0 {
            self.inner.freed.notify_all();
        }
        Ok(Statistics {
            data_nbytes: self.inner.data.nbytes() as u64,
            used_nbytes: state.table.used_nbytes(),
            largest_free_nbytes: state.table.largest_nbytes(),
            num_leases: self.inner.num_leases,
            leases_out: state.table.num_outstanding(),
            consumers: state.consumers.iter().flatten().count(),
            held: state.table.held(),
            ..state.counters.clone()
        })
    }

    /// Whether it was closed, or belongs to the process that this one was forked from.
    pub fn is_closed(&self) -> bool {
        self.inner.open().is_err()
    }

    /// Whether the thread waits for the next lease.
    #[cfg(all(test, not(loom)))]
    pub(super) fn is_parked(&self) -> bool {
        self.inner.lock().is_parked
    }

    /// Gives out no further lease, and ends the thread. Leases that are out stay readable for their consumers. May be
    /// called again; does nothing in a forked child.
    pub fn close(&self, limit: Duration) -> Result<()> {
        let inner = &self.inner;
        if !inner.process.is_current() {
            return Ok(());
        }
        let deadline = Instant::now().checked_add(limit);
        let mut state = inner.lock();
        state.is_closing = true;
        inner.work.notify_all();
        inner.freed.notify_all();
        while !state.has_ended {
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(ArenaError::Closing { waited: limit }.into());
            }
            state = inner.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        // No block is given out any more, so nobody's reads have to be waited for.
        let kept = (state.files.take(), std::mem::replace(&mut state.consumers, [const { None }; MAX_CONSUMERS]));
        drop(state);
        drop(kept);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = thread.map(JoinHandle::join);
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.inner.process.is_current() {
            let _ = self.close(Duration::from_secs(10));
        } else {
            // The handle names a thread that this process does not have.
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl State {
    /// Whether one of these consumers has to let go first, so that there is room for others; nobody when it is alone.
    fn over_share(&self, sizes: &[usize], mask: u32) -> Option<(usize, u64)> {
        let is_alone = self.consumers.iter().flatten().count() < 2;
        let nbytes = Table::group_nbytes(sizes)? as u64;
        if is_alone { None } else { self.table.over_share(nbytes, mask) }
    }

    fn mask_of(&self, consumers: &[u32]) -> Result<u32> {
        let mut mask = 0;
        for slot in consumers {
            let is_there = self.consumers.get(*slot as usize).is_some_and(Option::is_some);
            if !is_there {
                return Err(ArenaError::NoConsumer { slot: *slot }.into());
            }
            mask |= 1 << slot;
        }
        if mask == 0 {
            let wanted = "the number of at least one".to_owned();
            return Err(ArenaError::Option { setting: "consumers", found: "empty".to_owned(), wanted }.into());
        }
        Ok(mask)
    }
}

impl Inner {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<MutexGuard<'_, State>> {
        if !self.process.is_current() {
            return Err(self.closed());
        }
        let state = self.lock();
        if state.is_closing { Err(self.closed()) } else { Ok(state) }
    }

    pub(super) fn closed(&self) -> Error {
        Error::Closed { what: format!("arena {:016x}", self.instance) }
    }

    fn take_now(&self, state: &mut State, sizes: &[usize], mask: u32) -> Option<Vec<LeaseHandle>> {
        if state.over_share(sizes, mask).is_some() {
            return None;
        }
        let consumers = &state.consumers;
        let is_fresh = |index, generation| {
            slots_of(mask).filter_map(|slot| consumers[slot].as_ref()).all(|consumer| {
                let flags = layout::flags(&consumer.flags, self.num_leases, index);
                !flags.is_claimed(generation) && !flags.is_released(generation)
            })
        };
        let taken = state.table.take(sizes, mask, is_fresh)?;
        let mut handles = Vec::with_capacity(taken.len());
        for index in taken {
            let Some(entry) = state.table.entry(index) else { continue };
            layout::record(&self.control, index).publish(&entry);
            handles.push(LeaseHandle {
                instance: self.instance,
                index,
                generation: entry.generation,
                offset: entry.offset,
                nbytes: entry.nbytes,
            });
        }
        state.counters.taken += handles.len() as u64;
        if state.is_parked {
            self.work.notify_all();
        }
        Some(handles)
    }

    /// The writer has ended the lease. `is_left`: and nobody on our side can write to it any more.
    pub(super) fn end_writing(&self, handle: &LeaseHandle, is_aborted: bool, is_left: bool) {
        if !self.process.is_current() {
            return;
        }
        let mut state = self.lock();
        let State { table, consumers, counters, .. } = &mut *state;
        let Some(lease) = table.get_mut(handle.index, handle.generation) else { return };
        lease.is_writing = !is_left;
        if is_aborted {
            counters.aborted += 1;
            self.cancel_lease(consumers, handle.index, lease);
            if self.sweep(&mut state, false) > 0 {
                self.freed.notify_all();
            }
        } else if !lease.is_committed {
            (lease.is_committed, lease.since) = (true, Instant::now());
            counters.committed += 1;
        }
    }
}

/// Bytes and leases that these options ask for.
fn checked(options: &Options) -> std::result::Result<(usize, u32), ArenaError> {
    let bad = |setting, found: String, wanted: String| ArenaError::Option { setting, found, wanted };
    let size = || bad("data_nbytes", options.data_nbytes.to_string(), format!("1 to {MOST_DATA_BYTES}"));
    let data_nbytes =
        memfd::rounded(options.data_nbytes, options.huge_pages).filter(|nbytes| *nbytes > 0).ok_or_else(size)?;
    if data_nbytes as u64 > MOST_DATA_BYTES {
        return Err(size());
    }
    let num_leases = match options.num_leases {
        // One for each 64 KiB, so that leases and bytes run out together when tensors are small.
        None => ((data_nbytes >> 16) as u32).clamp(1024, 65536),
        Some(num_leases) if (1..=MOST_LEASES).contains(&num_leases) => num_leases,
        Some(num_leases) => return Err(bad("num_leases", num_leases.to_string(), format!("1 to {MOST_LEASES}"))),
    };
    Ok((data_nbytes, num_leases))
}
