//! Giving blocks back: the thread that looks at the flags, and what it shares with those who find the arena full.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::consumer::Consumer;
use super::layout;
use super::sender::{Inner, State};
use super::table::{Lease, MAX_CONSUMERS};

/// The thread looks at the flags after the first of these times, then after twice that, up to the second. No send waits
/// for it: one that finds too little room looks itself.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(10)];
/// The same while a send waits for room.
const WAITING_PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];
/// It goes on for so long after the last lease, so that each of several leases in a row does not cost a wake-up.
pub(super) const LINGER: Duration = Duration::from_secs(1);
/// How often consumers are asked whether they live.
const ALIVE_PAUSE: Duration = Duration::from_millis(5);

impl Inner {
    pub(super) fn cancel_lease(&self, consumers: &[Option<Consumer>; MAX_CONSUMERS], index: u32, lease: &mut Lease) {
        lease.is_cancelled = true;
        layout::record(&self.control, index).cancel();
        for slot in slots_of(lease.remaining) {
            let has_claimed = consumers[slot].as_ref().is_some_and(|consumer| {
                layout::flags(&consumer.flags, self.num_leases, index).is_claimed(lease.entry.generation)
            });
            if !has_claimed {
                lease.remaining &= !(1 << slot);
            }
        }
    }

    /// Reads the flags of all leases that are out and frees what is no longer read; how many leases. What a consumer
    /// released before it went counts as released.
    pub(super) fn sweep(&self, state: &mut State, asks_alive: bool) -> usize {
        let now = Instant::now();
        let State { table, consumers, counters, asked_alive, .. } = state;
        let mut gone = 0;
        if asks_alive || now.duration_since(*asked_alive) >= ALIVE_PAUSE {
            *asked_alive = now;
            gone = Consumer::gone(consumers.iter().enumerate().filter_map(|(slot, one)| Some((slot, one.as_ref()?))));
        }
        let freed = table.sweep(|index, lease| {
            let mut has_unclaimed = false;
            for slot in slots_of(lease.remaining) {
                let Some(consumer) = consumers[slot].as_ref() else {
                    lease.remaining &= !(1 << slot);
                    continue;
                };
                let flags = layout::flags(&consumer.flags, self.num_leases, index);
                if flags.is_released(lease.entry.generation) {
                    lease.remaining &= !(1 << slot);
                    counters.released += 1;
                } else if gone & (1 << slot) != 0 {
                    lease.remaining &= !(1 << slot);
                } else {
                    has_unclaimed |= !flags.is_claimed(lease.entry.generation);
                }
            }
            if lease.entry.consumers & gone != 0 {
                lease.entry.consumers &= !gone;
                // The slot can be another consumer's soon, which must not claim this lease.
                layout::record(&self.control, index).keep_consumers(lease.entry.consumers);
            }
            let is_old = now.duration_since(lease.since) >= self.unclaimed_limit;
            if has_unclaimed && is_old && !lease.is_unfinished() && !lease.is_cancelled {
                counters.expired += 1;
                self.cancel_lease(consumers, index, lease);
            }
        });
        for index in &freed {
            layout::record(&self.control, *index).retire();
        }
        for slot in slots_of(gone) {
            consumers[slot] = None;
            counters.consumers_gone += 1;
        }
        freed.len()
    }

    /// The thread: looks at the flags while leases are out and for [`LINGER`] after, and sleeps otherwise.
    pub(super) fn give_back(&self) {
        let mut state = self.lock();
        let (mut last_out, mut pause, mut was_awaited) = (Instant::now(), Duration::ZERO, false);
        while !state.is_closing {
            let is_freed = self.sweep(&mut state, false) > 0;
            if is_freed {
                self.freed.notify_all();
            }
            if is_freed || state.table.num_outstanding() > 0 {
                last_out = Instant::now();
            } else if last_out.elapsed() >= LINGER {
                state.is_parked = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.is_parked = false;
                (last_out, pause) = (Instant::now(), Duration::ZERO);
                continue;
            }
            let is_awaited = state.num_waiting > 0;
            let [least, most] = if is_awaited { WAITING_PAUSES } else { PAUSES };
            pause = if is_freed || is_awaited && !was_awaited { least } else { (pause * 2).clamp(least, most) };
            was_awaited = is_awaited;
            state = self.work.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.has_ended = true;
        self.work.notify_all();
    }
}

/// The numbers of the consumers in a mask.
pub(super) fn slots_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..MAX_CONSUMERS).filter(move |slot| mask & (1 << slot) != 0)
}
