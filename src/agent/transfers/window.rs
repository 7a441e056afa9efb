//! How much may be in flight, to one peer and to all.

use crate::agent::core::config::Window;
use crate::agent::core::id_map::IdMap;
use crate::agent::core::ids::PeerId;

/// Operations in flight and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
}

impl Load {
    fn add(&mut self, bytes: u64) {
        self.operations += 1;
        self.bytes += bytes;
    }

    fn remove(&mut self, bytes: u64) {
        self.operations = self.operations.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Whether an operation of `len` bytes may join. One of any size may if there is none.
    fn has_room(self, window: Window, len: u64) -> bool {
        self.operations == 0
            || (self.operations < u64::from(window.operations) && self.bytes.saturating_add(len) <= window.bytes)
    }
}

/// What is in flight, within its limits.
#[derive(Debug)]
pub(crate) struct Windows {
    total: Load,
    peers: IdMap<PeerId, Load>,
    total_limit: Window,
    peer_limit: Window,
}

impl Windows {
    pub(super) fn new(total_limit: Window, peer_limit: Window) -> Self {
        Windows { total: Load::default(), peers: IdMap::default(), total_limit, peer_limit }
    }

    /// In flight to all peers.
    pub(crate) fn total(&self) -> Load {
        self.total
    }

    /// In flight to one peer.
    pub(crate) fn of(&self, peer: PeerId) -> Load {
        self.peers.get(&peer).copied().unwrap_or_default()
    }

    /// The most bytes that may be in flight to one peer.
    pub(crate) fn peer_bytes(&self) -> u64 {
        self.peer_limit.bytes
    }

    /// Whether there is room for an operation of `len` bytes to this peer.
    pub(crate) fn have_room(&self, peer: PeerId, len: u64) -> bool {
        self.total.has_room(self.total_limit, len) && self.of(peer).has_room(self.peer_limit, len)
    }

    /// An operation of `len` bytes is in flight.
    pub(crate) fn enter(&mut self, peer: PeerId, len: u64) {
        self.total.add(len);
        self.peers.entry(peer).or_default().add(len);
    }

    /// It is not any more.
    pub(super) fn leave(&mut self, peer: PeerId, len: u64) {
        self.total.remove(len);
        if let Some(load) = self.peers.get_mut(&peer) {
            load.remove(len);
            if *load == Load::default() {
                self.peers.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_takes_one_operation_of_any_size_and_then_what_fits() {
        let window = Window { operations: 2, bytes: 100 };
        let fits = |operations, bytes, len| Load { operations, bytes }.has_room(window, len);
        assert!(fits(0, 0, 1000));
        assert!(fits(1, 60, 40));
        assert!(!fits(1, 60, 41));
        assert!(!fits(2, 2, 1));
        assert!(!fits(1, u64::MAX, u64::MAX));
    }

    #[test]
    fn what_has_ended_makes_room_again() {
        let mut windows = Windows::new(Window { operations: 3, bytes: 1000 }, Window { operations: 2, bytes: 100 });
        let (a, b) = (PeerId::from_raw(1), PeerId::from_raw(2));
        windows.enter(a, 60);
        windows.enter(a, 40);
        assert!(!windows.have_room(a, 1) && windows.have_room(b, 1));
        windows.enter(b, 1);
        assert!(!windows.have_room(b, 1), "all together");
        windows.leave(a, 60);
        assert!(windows.have_room(a, 60) && windows.have_room(b, 1));
        windows.leave(a, 40);
        windows.leave(b, 1);
        assert_eq!((windows.total(), windows.peers.len()), (Load::default(), 0));
    }
}
