//! How much may be in flight: to one peer, and to all.
//!
//! A part of each peer's window is the peer's own: nothing that others have in flight takes it. What a peer has in flight beyond
//! that comes out of a total that all share. A peer that ends nothing of it for [`PATIENCE`] leaves the total to the others
//! until it does, so that peers which stand still hold up nobody.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::agent::core::config::Window;
use crate::agent::core::id_map::IdMap;
use crate::agent::core::ids::PeerId;

/// How long a peer may end no operation and still count in the total. It stops counting after at most twice as long.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);
/// The part of its window that is a peer's own.
const OWN_PART: u32 = 16;

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

    /// With one more operation.
    fn with(mut self, bytes: u64) -> Load {
        self.operations = self.operations.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
        self
    }

    fn plus(self, other: Load) -> Load {
        Load {
            operations: self.operations.saturating_add(other.operations),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    fn minus(self, other: Load) -> Load {
        Load {
            operations: self.operations.saturating_sub(other.operations),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }

    /// What of it is beyond a window. A single operation of any size is not.
    fn beyond(self, window: Window) -> Load {
        match self.operations {
            0 | 1 => Load::default(),
            _ => self.minus(Load { operations: window.operations.into(), bytes: window.bytes }),
        }
    }

    fn fits(self, window: Window) -> bool {
        self.operations <= u64::from(window.operations) && self.bytes <= window.bytes
    }

    /// Whether an operation of `len` bytes may join. One of any size may if there is none.
    fn has_room(self, window: Window, len: u64) -> bool {
        self.operations == 0 || self.with(len).fits(window)
    }
}

/// The limit that an operation does not fit in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// What may be in flight to the peer: some of that has to end.
    Peer,
    /// The total.
    Total,
}

/// What one peer has in flight.
#[derive(Debug, Clone, Copy, Default)]
struct PeerLoad {
    load: Load,
    /// What of it counts in the total.
    shared: Load,
    /// Whether `watched` has an entry for it.
    is_watched: bool,
    /// Whether it has ended an operation since it was checked last.
    has_progressed: bool,
    /// Whether it has not for so long that nothing of it counts in the total.
    is_stalled: bool,
}

/// What is in flight, within its limits.
#[derive(Debug)]
pub(crate) struct Windows {
    /// In flight to all peers.
    all: Load,
    /// What of it counts in the total.
    shared: Load,
    /// Whether that has become less since it was last found full.
    has_shrunk: bool,
    peers: IdMap<PeerId, PeerLoad>,
    /// When to check whether a peer that has a share of the total has progressed.
    watched: BinaryHeap<Reverse<(Instant, PeerId)>>,
    total_limit: Window,
    peer_limit: Window,
    /// A peer's own part of `peer_limit`.
    own: Window,
}

impl Windows {
    pub(super) fn new(total_limit: Window, peer_limit: Window) -> Self {
        let own = Window {
            operations: (peer_limit.operations / OWN_PART).max(1),
            bytes: (peer_limit.bytes / u64::from(OWN_PART)).max(1),
        };
        Windows {
            all: Load::default(),
            shared: Load::default(),
            has_shrunk: false,
            peers: IdMap::default(),
            watched: BinaryHeap::new(),
            total_limit,
            peer_limit,
            own,
        }
    }

    /// In flight to all peers.
    pub(crate) fn total(&self) -> Load {
        self.all
    }

    /// In flight to one peer.
    pub(crate) fn of(&self, peer: PeerId) -> Load {
        self.peers.get(&peer).map(|known| known.load).unwrap_or_default()
    }

    /// The most bytes that may be in flight to one peer.
    pub(crate) fn peer_bytes(&self) -> u64 {
        self.peer_limit.bytes
    }

    /// Checks whether an operation of `len` bytes to this peer fits; says what it does not fit in.
    pub(crate) fn find_room(&self, peer: PeerId, len: u64) -> Result<(), Lack> {
        let known = self.peers.get(&peer).copied().unwrap_or_default();
        if !known.load.has_room(self.peer_limit, len) {
            return Err(Lack::Peer);
        }
        if known.load.has_room(self.own, len) || self.total_has_room(known, len) {
            return Ok(());
        }
        Err(if known.is_stalled { Lack::Peer } else { Lack::Total })
    }

    /// Whether the total has become less since [`Windows::is_full`].
    pub(super) fn may_have_room(&self) -> bool {
        self.has_shrunk
    }

    /// Notes that the total has no room for the peer that waits for it longest.
    pub(super) fn is_full(&mut self) {
        self.has_shrunk = false;
    }

    /// Whether the total has room for what an operation of `len` bytes adds to it. One of any size has if nothing counts in it.
    fn total_has_room(&self, known: PeerLoad, len: u64) -> bool {
        let others = self.shared.minus(known.shared);
        !known.is_stalled
            && (self.shared == Load::default()
                || others.plus(known.load.with(len).beyond(self.own)).fits(self.total_limit))
    }

    /// An operation of `len` bytes is in flight.
    pub(crate) fn enter(&mut self, peer: PeerId, len: u64, now: Instant) {
        self.all.add(len);
        self.peers.entry(peer).or_default().load.add(len);
        self.count(peer, now);
    }

    /// It is not any more.
    pub(super) fn leave(&mut self, peer: PeerId, len: u64, now: Instant) {
        self.all.remove(len);
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.load.remove(len);
        (known.has_progressed, known.is_stalled) = (true, false);
        self.count(peer, now);
    }

    /// Counts anew what a peer has of the total, which is checked from then on.
    fn count(&mut self, peer: PeerId, now: Instant) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let share = if known.is_stalled { Load::default() } else { known.load.beyond(self.own) };
        self.has_shrunk |= known.shared.minus(share) != Load::default();
        self.shared = self.shared.minus(known.shared).plus(share);
        known.shared = share;
        if known.is_watched {
            return;
        }
        if share != Load::default() {
            (known.is_watched, known.has_progressed) = (true, false);
            self.watched.push(Reverse((now + PATIENCE, peer)));
        } else if known.load == Load::default() {
            self.peers.remove(&peer);
        }
    }

    /// When to check next whether peers have progressed, if any has a share of the total.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.watched.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes their share from peers that have not progressed for [`PATIENCE`].
    pub(super) fn check(&mut self, now: Instant) {
        while self.deadline().is_some_and(|at| at <= now)
            && let Some(Reverse((_, peer))) = self.watched.pop()
        {
            let Some(known) = self.peers.get_mut(&peer) else { continue };
            known.is_watched = false;
            known.is_stalled |= !known.has_progressed && known.shared != Load::default();
            self.count(peer, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows in which three units are shared, and a peer has 32, two of them its own.
    fn windows() -> Windows {
        let window = |units: u32| Window { operations: units, bytes: u64::from(units) * 100 };
        Windows::new(window(3), window(32))
    }

    fn peers() -> [PeerId; 2] {
        [1, 2].map(PeerId::from_raw)
    }

    fn has_room(windows: &Windows, peer: PeerId, len: u64) -> bool {
        windows.find_room(peer, len).is_ok()
    }

    /// Puts as many operations of 100 bytes in flight as there is room for; gives their number.
    fn fill(windows: &mut Windows, peer: PeerId, now: Instant) -> u64 {
        let before = windows.of(peer).operations;
        while has_room(windows, peer, 100) {
            windows.enter(peer, 100, now);
        }
        windows.of(peer).operations - before
    }

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
    fn every_peer_has_a_part_of_its_own() {
        let [a, b] = peers();
        let (mut windows, now) = (windows(), Instant::now());
        assert_eq!(fill(&mut windows, a, now), 5, "its own and all that is shared");
        for other in 2..1000 {
            assert_eq!(fill(&mut windows, PeerId::from_raw(other), now), 2);
        }
        assert_eq!(windows.shared, Load { operations: 3, bytes: 300 });
        windows.leave(a, 100, now);
        assert_eq!(fill(&mut windows, b, now), 1, "what has ended makes room for others");
        assert_eq!(fill(&mut windows, a, now), 0);
        windows.leave(b, 100, now);
        windows.leave(b, 100, now);
        assert_eq!(fill(&mut windows, a, now), 1);
        assert_eq!(fill(&mut windows, b, now), 1);
    }

    #[test]
    fn one_operation_of_any_size_is_a_peers_own() {
        let [a, b] = peers();
        let (mut windows, now) = (windows(), Instant::now());
        windows.enter(a, 10_000, now);
        assert_eq!((windows.shared, windows.deadline()), (Load::default(), None));
        assert!(!has_room(&windows, a, 1), "the peer's window is full");
        assert!(has_room(&windows, b, 10_000));
    }

    #[test]
    fn a_total_that_is_less_than_an_operation_takes_one() {
        let [a, b] = peers();
        let limit = |bytes| Window { operations: 64, bytes };
        let (mut windows, now) = (Windows::new(limit(1), limit(1600)), Instant::now());
        windows.enter(a, 100, now);
        assert!(has_room(&windows, a, 100));
        windows.enter(a, 100, now);
        assert!(!has_room(&windows, a, 100));
        windows.enter(b, 100, now);
        assert!(!has_room(&windows, b, 100));
    }

    #[test]
    fn peers_without_progress_stop_counting() {
        let [a, b] = peers();
        let (mut windows, now) = (windows(), Instant::now());
        let at = |patience: u32| now + PATIENCE * patience;
        assert_eq!((fill(&mut windows, a, now), fill(&mut windows, b, now)), (5, 2));
        windows.check(at(1) - Duration::from_nanos(1));
        assert_eq!(fill(&mut windows, b, now), 0);
        windows.leave(a, 100, now);
        windows.enter(a, 100, now);
        windows.check(at(1));
        assert_eq!((fill(&mut windows, b, at(1)), windows.deadline()), (0, Some(at(2))), "it has ended one");
        windows.check(at(2));
        assert_eq!((windows.deadline(), windows.of(a).operations), (None, 5));
        assert_eq!(fill(&mut windows, b, at(2)), 3, "nothing of the other counts");
        assert!(!has_room(&windows, a, 100), "it gets no more");
        // It goes on: what it has counts again, and nobody gets more before that is less.
        windows.leave(a, 100, now);
        assert_eq!(windows.shared, Load { operations: 5, bytes: 500 });
        assert!(!has_room(&windows, a, 100) && !has_room(&windows, b, 100));
        for _ in 0..3 {
            windows.leave(a, 100, now);
        }
        assert_eq!(fill(&mut windows, a, at(3)), 1, "its own");
        for (peer, count) in [(a, 2), (b, 5)] {
            (0..count).for_each(|_| windows.leave(peer, 100, now));
        }
        assert_eq!((windows.total(), windows.shared), (Load::default(), Load::default()));
        windows.check(at(4));
        assert_eq!((windows.peers.len(), windows.deadline()), (0, None));
    }
}
