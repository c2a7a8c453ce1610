//! Giving blocks back: the thread that looks at the flags, and what it shares with those who find the arena full.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::consumer::Consumer;
use super::layout;
use super::sender::{Inner, State};
use super::table::{Lease, MAX_CONSUMERS};

/// The thread looks again after this when a send waits for room or a lease has just been released.
const SHORT_PAUSE: Duration = Duration::from_micros(50);
/// Longest pause while a send waits for room.
const WAITING_PAUSE: Duration = Duration::from_millis(1);
/// Longest pause while leases are out.
const LONG_PAUSE: Duration = Duration::from_millis(10);
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

    /// Reads the flags of all leases that are out and frees what is no longer read; how many leases.
    pub(super) fn sweep(&self, state: &mut State, asks_alive: bool) -> usize {
        let now = Instant::now();
        let State { table, consumers, counters, asked_alive, .. } = state;
        let mut gone = 0;
        if asks_alive || now.duration_since(*asked_alive) >= ALIVE_PAUSE {
            *asked_alive = now;
            gone = Consumer::gone(consumers.iter().enumerate().filter_map(|(slot, one)| Some((slot, one.as_ref()?))));
        }
        let freed = table.sweep(|index, lease| {
            if lease.remaining & gone != 0 {
                lease.remaining &= !gone;
                lease.entry.consumers &= !gone;
                // The slot can be another consumer's soon, which must not claim this lease.
                layout::record(&self.control, index).keep_consumers(lease.entry.consumers);
            }
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
                } else {
                    has_unclaimed |= !flags.is_claimed(lease.entry.generation);
                }
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

    /// The thread: looks at the flags while leases are out, and sleeps while none is.
    pub(super) fn give_back(&self) {
        let mut pause = SHORT_PAUSE;
        let mut state = self.lock();
        while !state.is_closing {
            if state.table.num_outstanding() == 0 {
                state.is_parked = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.is_parked = false;
                pause = SHORT_PAUSE;
                continue;
            }
            if self.sweep(&mut state, false) > 0 {
                self.freed.notify_all();
                pause = SHORT_PAUSE;
            } else {
                pause = (pause * 2).min(LONG_PAUSE);
            }
            let most = if state.num_waiting > 0 { WAITING_PAUSE } else { LONG_PAUSE };
            state = self.work.wait_timeout(state, pause.min(most)).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.has_ended = true;
        self.work.notify_all();
    }
}

/// The numbers of the consumers in a mask.
pub(super) fn slots_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..MAX_CONSUMERS).filter(move |slot| mask & (1 << slot) != 0)
}
