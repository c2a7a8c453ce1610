//! The arenas that senders have handed over.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::socket::Deadline;
use crate::arena::Map;

/// All arenas whose senders are connected.
#[derive(Debug)]
pub(super) struct Arenas {
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    maps: Vec<Arc<Map>>,
    accepted: u64,
}

impl Arenas {
    pub(super) fn new(most: usize) -> Self {
        Self { most, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes a new one. An error, in words, when there are too many.
    pub(super) fn add(&self, map: &Arc<Map>) -> Result<(), String> {
        let mut state = self.lock();
        if state.maps.len() >= self.most {
            return Err(format!("{} arenas are mapped already", state.maps.len()));
        }
        state.maps.push(Arc::clone(map));
        state.accepted += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Its sender has gone. Each user that is left keeps it mapped.
    pub(super) fn remove(&self, map: &Arc<Map>) {
        map.owner_has_gone();
        self.lock().maps.retain(|other| !Arc::ptr_eq(other, map));
        self.changed.notify_all();
    }

    /// All of them, the newest last.
    pub(super) fn all(&self) -> Vec<Arc<Map>> {
        self.lock().maps.clone()
    }

    /// That of this random number. A sender that came back before its old connection was seen to end has two; the newer
    /// counts.
    pub(super) fn find(&self, instance: u64) -> Option<Arc<Map>> {
        self.lock().maps.iter().rev().find(|map| map.instance() == instance).map(Arc::clone)
    }

    /// Blocks until more than `seen` were accepted; how many were.
    pub(super) fn wait(&self, seen: u64, limit: Duration) -> u64 {
        let deadline = Deadline::after(limit);
        let mut state = self.lock();
        while state.accepted <= seen && !deadline.left().is_zero() {
            state = self.changed.wait_timeout(state, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.accepted
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
