//! Regions of this side that peers were asked to release.

use std::collections::BTreeMap;
use std::ops::RangeTo;
use std::time::Instant;

use crate::agent::core::effect::GivenUp;
use crate::agent::core::ids::PeerId;
use crate::agent::core::regions::Hold;

/// The regions that one peer may still use.
#[derive(Default)]
struct Holder {
    /// Uses that it was asked to end.
    holds: BTreeMap<u32, Hold>,
    /// Whether it has said that it uses memory of this side for longer, and will say when it does not.
    is_in_use: bool,
    /// Where it was given up and can say nothing any more: the regions that what it has begun may use, and how long that may
    /// take, if there is a limit.
    given_up: Option<(GivenUp, RangeTo<u32>, Option<Instant>)>,
}

/// The peers that may use regions which are being deregistered, and those that were given up and may use any.
#[derive(Default)]
pub(crate) struct Holds(BTreeMap<PeerId, Holder>);

impl Holds {
    /// A peer is to release a region. Whether that was not so before.
    pub(crate) fn insert(&mut self, hold: Hold) -> bool {
        self.0.entry(hold.peer).or_default().holds.insert(hold.region, hold).is_none()
    }

    /// A peer has released a region.
    pub(crate) fn release(&mut self, peer: PeerId, region: u32) {
        let Some(holder) = self.0.get_mut(&peer) else { return };
        holder.holds.remove(&region);
        if holder.holds.is_empty() && holder.given_up.is_none() {
            self.0.remove(&peer);
        }
    }

    /// A peer says that it uses memory of this side for longer.
    pub(crate) fn note_use(&mut self, peer: PeerId) {
        self.0.entry(peer).or_default().is_in_use = true;
    }

    /// Whether a peer has said so, and not that it has ended.
    pub(crate) fn is_in_use(&self, peer: PeerId) -> bool {
        self.0.get(&peer).is_some_and(|holder| holder.is_in_use)
    }

    /// The peers that have yet to release any region.
    pub(crate) fn holders(&self) -> impl Iterator<Item = PeerId> {
        self.0.iter().filter(|(_, holder)| !holder.holds.is_empty()).map(|(peer, _)| *peer)
    }

    /// The peers that have yet to release a region.
    pub(crate) fn holders_of(&self, region: u32) -> impl Iterator<Item = PeerId> {
        self.0.iter().filter(move |(_, holder)| holder.holds.contains_key(&region)).map(|(peer, _)| *peer)
    }

    /// A peer is given up whose process goes on, and with it what it has begun with these `regions`, `until` then at the latest
    /// if it has not said that it takes longer.
    pub(crate) fn give_up(&mut self, peer: PeerId, given_up: GivenUp, regions: RangeTo<u32>, until: Option<Instant>) {
        let holder = self.0.entry(peer).or_default();
        holder.given_up = Some((given_up, regions, until.filter(|_| !holder.is_in_use)));
    }

    /// The peers that were given up and may use a region.
    pub(crate) fn given_up(&self, region: u32) -> impl Iterator<Item = (PeerId, GivenUp)> {
        self.0.iter().filter_map(move |(peer, holder)| {
            let (given_up, regions, _) = holder.given_up?;
            regions.contains(&region).then_some((*peer, given_up))
        })
    }

    /// A peer is gone, and uses nothing any more.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.0.remove(&peer);
    }

    /// Forgets the peers that were given up and have had their time, or whose processes have ended.
    pub(crate) fn forget_ended(&mut self, now: Instant, has_ended: impl Fn(u32) -> bool) {
        self.0.retain(|_, holder| {
            holder.given_up.is_none_or(|(GivenUp { process, .. }, _, until)| {
                // The system is asked only where something waits for it.
                let is_awaited = !holder.holds.is_empty();
                until.is_none_or(|until| now < until)
                    && !process.is_some_and(|process| is_awaited && has_ended(process))
            })
        });
    }

    /// When the next of these has had its time.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.values().filter_map(|holder| holder.given_up?.2).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const A: PeerId = PeerId(1);
    const B: PeerId = PeerId(2);

    fn holders_of(holds: &Holds, region: u32) -> Vec<PeerId> {
        holds.holders_of(region).collect()
    }

    #[test]
    fn peers_release_once_or_leave() {
        let mut holds = Holds::default();
        let mut insert = |region, peer| holds.insert(Hold::new(region, peer));
        assert!(insert(3, A) && !insert(3, A) && insert(3, B) && insert(4, B));
        assert_eq!(holders_of(&holds, 3), [A, B]);
        holds.release(A, 3);
        holds.release(A, 4);
        assert_eq!(holders_of(&holds, 3), [B]);
        holds.note_use(A);
        holds.note_use(B);
        assert!(holds.insert(Hold::new(5, A)) && holds.insert(Hold::new(6, A)));
        assert_eq!(holds.holders().collect::<Vec<_>>(), [A, B]);
        holds.release(A, 5);
        assert!(holds.is_in_use(A), "of one more it has not said so");
        holds.release(A, 6);
        assert!(!holds.is_in_use(A));
        holds.forget(B);
        assert!(!holds.is_in_use(B) && holds.holders().next().is_none());
    }

    #[test]
    fn given_up_peer_holds_for_a_time() {
        let mut holds = Holds::default();
        let given_up = |process| GivenUp { process, is_near: true, on_this_host: true };
        let now = Instant::now();
        let until = now + Duration::from_secs(1);
        holds.note_use(A);
        for peer in [A, B] {
            assert!(holds.insert(Hold::new(3, peer)));
            holds.give_up(peer, given_up(Some(70)), ..4, Some(until));
        }
        holds.forget_ended(now, |_| false);
        assert_eq!((holders_of(&holds, 3), holds.deadline()), (vec![A, B], Some(until)));
        holds.release(B, 3);
        assert_eq!((holds.given_up(2).count(), holds.given_up(4).count()), (2, 0), "it may use others of before");
        holds.forget_ended(until, |_| false);
        assert_eq!(
            (holders_of(&holds, 3), holds.given_up(3).count()),
            (vec![A], 1),
            "it has said that it takes longer"
        );
        holds.forget_ended(until, |process| process == 70);
        assert!(holds.given_up(3).next().is_none() && holds.holders().next().is_none());
    }
}
