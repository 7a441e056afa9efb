//! Which peer's transfers post next: peers take turns. One that has no room is not visited before that may have changed, so
//! that a turn of the loop costs nothing for peers that stand still.

use std::collections::VecDeque;

use super::window::Lack;
use crate::agent::core::id_map::IdMap;
use crate::agent::core::ids::{PeerId, TransferId};

/// The transfers of one peer that have something to post, in the order of their turns.
#[derive(Debug)]
struct Queue {
    transfers: VecDeque<TransferId>,
    place: Place,
}

/// Where a peer waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In `ready` or `passed_over`.
    Ready,
    /// It has its turn.
    InTurn,
    /// For the peer's hello, or for the end of an operation with it.
    Parked,
    /// In `starved`.
    Starved,
}

/// The queues of all peers that have something to post.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_peer: IdMap<PeerId, Queue>,
    /// Peers that may have room, in the order of their turns.
    ready: VecDeque<PeerId>,
    /// Peers that could not post in this round, and may in the next.
    passed_over: Vec<PeerId>,
    /// Peers for which there was no room in the total, in the order in which they get it.
    starved: VecDeque<PeerId>,
    /// Whether the peer in turn was starved.
    was_starved: bool,
}

impl Queues {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_peer.is_empty()
    }

    pub(super) fn has_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Whether any peer may post. `has_room`: whether the total may have room.
    pub(super) fn has_next(&self, has_room: bool) -> bool {
        !self.ready.is_empty() || has_room && self.has_starved()
    }

    /// Queues a transfer of a peer before all others.
    pub(super) fn push_front(&mut self, peer: PeerId, id: TransferId) {
        self.queue(peer).push_front(id);
        self.wake(peer);
    }

    /// Queues a transfer of a peer behind all others.
    pub(super) fn push_back(&mut self, peer: PeerId, id: TransferId) {
        self.queue(peer).push_back(id);
        self.wake(peer);
    }

    fn queue(&mut self, peer: PeerId) -> &mut VecDeque<TransferId> {
        let new = || Queue { transfers: VecDeque::new(), place: Place::Parked };
        &mut self.by_peer.entry(peer).or_insert_with(new).transfers
    }

    /// Something has happened that may make room for a peer.
    pub(super) fn wake(&mut self, peer: PeerId) {
        let Some(queue) = self.by_peer.get_mut(&peer) else { return };
        match queue.place {
            Place::Ready | Place::InTurn => return,
            Place::Parked => {}
            Place::Starved => self.starved.retain(|starved| *starved != peer),
        }
        queue.place = Place::Ready;
        self.ready.push_back(peer);
    }

    /// The peer whose turn it is; [`Queues::end_turn`], [`Queues::park`] or [`Queues::remove`] follows.
    pub(super) fn begin_turn(&mut self, has_room: bool) -> Option<PeerId> {
        // By turns, so that neither waits for all of the other.
        let starved =
            if has_room && (!self.was_starved || self.ready.is_empty()) { self.starved.pop_front() } else { None };
        self.was_starved = starved.is_some();
        let peer = starved.or_else(|| self.ready.pop_front())?;
        if let Some(queue) = self.by_peer.get_mut(&peer) {
            queue.place = Place::InTurn;
        }
        Some(peer)
    }

    /// Takes the next transfer out of a peer's queue.
    pub(super) fn pop(&mut self, peer: PeerId) -> Option<TransferId> {
        self.by_peer.get_mut(&peer)?.transfers.pop_front()
    }

    /// Puts the peer's transfer back, which was popped: before all others, or behind them.
    pub(super) fn put_back(&mut self, peer: PeerId, id: TransferId, is_next: bool) {
        let Some(queue) = self.by_peer.get_mut(&peer) else { return };
        if is_next {
            queue.transfers.push_front(id);
        } else {
            queue.transfers.push_back(id);
        }
    }

    /// The peer has had its turn. `stopped_by`: what kept it from posting anything, if nothing was posted. Returns whether a
    /// starved peer has found the total full.
    pub(super) fn end_turn(&mut self, peer: PeerId, has_posted: bool, stopped_by: Option<Lack>) -> bool {
        let Some(queue) = self.by_peer.get_mut(&peer) else { return false };
        if queue.transfers.is_empty() {
            self.remove(peer);
            return false;
        }
        if queue.place != Place::InTurn {
            return false;
        }
        match stopped_by.filter(|_| !has_posted) {
            Some(Lack::Peer) => queue.place = Place::Parked,
            Some(Lack::Total) => {
                queue.place = Place::Starved;
                if self.was_starved {
                    self.starved.push_front(peer);
                    return true;
                }
                self.starved.push_back(peer);
            }
            None => {
                queue.place = Place::Ready;
                if has_posted {
                    self.ready.push_back(peer);
                } else {
                    self.passed_over.push(peer);
                }
            }
        }
        false
    }

    /// The peer in turn cannot post before [`Queues::wake`].
    pub(super) fn park(&mut self, peer: PeerId) {
        if let Some(queue) = self.by_peer.get_mut(&peer) {
            queue.place = Place::Parked;
        }
    }

    /// Those that were passed over are tried again in the next round.
    pub(super) fn end_round(&mut self) {
        self.ready.extend(self.passed_over.drain(..));
    }

    /// Nothing of a peer is to be posted.
    pub(super) fn remove(&mut self, peer: PeerId) {
        match self.by_peer.remove(&peer).map(|queue| queue.place) {
            Some(Place::Ready) => {
                self.ready.retain(|ready| *ready != peer);
                self.passed_over.retain(|passed| *passed != peer);
            }
            Some(Place::Starved) => self.starved.retain(|starved| *starved != peer),
            Some(Place::InTurn | Place::Parked) | None => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Queues of peers 1 to `count`, with two transfers each.
    fn queues(count: u64) -> Queues {
        let mut queues = Queues::default();
        for peer in 1..=count {
            queues.push_back(PeerId::from_raw(peer), TransferId::from_raw(10 * peer));
            queues.push_back(PeerId::from_raw(peer), TransferId::from_raw(10 * peer + 1));
        }
        queues
    }

    /// The peer in turn tries its next transfer, and keeps it.
    fn turn(queues: &mut Queues, has_room: bool, has_posted: bool, lack: Option<Lack>) -> Option<(u64, bool)> {
        let peer = queues.begin_turn(has_room)?;
        let id = queues.pop(peer).unwrap();
        queues.put_back(peer, id, !has_posted);
        Some((peer.raw(), queues.end_turn(peer, has_posted, lack)))
    }

    #[test]
    fn peers_that_post_take_turns() {
        let mut queues = queues(3);
        let order = [(); 7].map(|()| turn(&mut queues, false, true, None).unwrap().0);
        assert_eq!(order, [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!(queues.pop(PeerId::from_raw(2)), Some(TransferId::from_raw(20)), "both transfers had a turn");
    }

    #[test]
    fn peers_without_room_are_not_visited() {
        let mut queues = queues(3);
        for peer in 1..=3 {
            assert_eq!(turn(&mut queues, true, false, Some(Lack::Peer)), Some((peer, false)));
        }
        assert!(!queues.has_next(true) && turn(&mut queues, true, false, None).is_none());
        queues.wake(PeerId::from_raw(2));
        queues.wake(PeerId::from_raw(2));
        assert_eq!(turn(&mut queues, true, false, Some(Lack::Peer)), Some((2, false)));
        assert!(!queues.has_next(true));
        // A new transfer may be small enough.
        queues.push_front(PeerId::from_raw(3), TransferId::from_raw(33));
        assert_eq!(queues.begin_turn(false).and_then(|peer| queues.pop(peer)), Some(TransferId::from_raw(33)));
    }

    #[test]
    fn longest_starved_peer_gets_the_room() {
        let mut queues = queues(3);
        for peer in 1..=3 {
            assert_eq!(turn(&mut queues, false, false, Some(Lack::Total)), Some((peer, false)));
        }
        assert!(!queues.has_next(false) && queues.has_next(true));
        assert_eq!(turn(&mut queues, true, true, None), Some((1, false)));
        assert_eq!(turn(&mut queues, true, false, Some(Lack::Total)), Some((1, false)), "behind the others");
        assert_eq!(turn(&mut queues, true, false, Some(Lack::Total)), Some((2, true)));
        // An operation of its own has ended.
        queues.wake(PeerId::from_raw(3));
        assert_eq!(turn(&mut queues, false, false, Some(Lack::Total)), Some((3, false)));
        let order = [(); 4].map(|()| turn(&mut queues, true, true, None).unwrap().0);
        assert_eq!(order, [2, 2, 1, 2], "those that have room wait for none that is starved");
        queues.remove(PeerId::from_raw(3));
        assert!(!queues.has_starved());
    }

    #[test]
    fn skipped_peer_is_tried_next_round() {
        let mut queues = queues(2);
        assert_eq!(turn(&mut queues, false, false, None), Some((1, false)));
        queues.park(queues.ready.front().copied().unwrap());
        assert_eq!(turn(&mut queues, false, true, None), Some((2, false)));
        queues.remove(PeerId::from_raw(2));
        assert!(!queues.has_next(true));
        queues.end_round();
        assert_eq!(turn(&mut queues, false, true, None), Some((1, false)));
        queues.remove(PeerId::from_raw(1));
        assert!(queues.is_empty() && !queues.has_next(true));
    }
}
