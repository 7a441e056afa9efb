//! Whether a peer is on this host, which process it is, and whether each side may copy the other's memory by itself.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::hello::Hello;
use crate::error::ErrorKind;
use crate::proto::ids::Incarnation;
use crate::proto::wire::limits::MAX_REGIONS;
use crate::sys::ended::has_ended;
use crate::sys::process::{Challenge, Neighbour, ProcessPlace, Witness};

/// Where a peer is, and what either side has proved of its process.
pub(crate) struct Locality {
    /// Whether the peer may copy this side's host memory by itself: so the lanes of the connection say, from its beginning on.
    pub(crate) is_near: bool,
    /// Whether the peer is on this host.
    pub(crate) on_this_host: bool,
    /// The peer's process, if this one may copy its memory.
    pub(crate) neighbour: Option<Arc<Neighbour>>,
    /// Where the peer says that it is, until its witness there has proved that.
    pub(super) claimed: Option<ProcessPlace>,
    /// The peer's process here, as it says in answer to this side's hello, which only it got.
    answered_by: Option<u32>,
    /// The words that the peer's witness must hold.
    pub(super) challenge: Challenge,
    /// The words by which the peer knows this process.
    pub(super) witness: Witness,
    /// The peer's challenge, as long as it is not answered.
    unanswered: Option<Challenge>,
    /// Whether the peer releases regions of this side when it is asked to.
    pub(crate) takes_revocations: bool,
    /// Whether the peer waits for this side's answer where it is told that its memory is in use.
    pub(crate) knows_uses: bool,
    /// Regions of this side that were revoked since the peer was sent a hello, and before it has said its own. As long as it has
    /// not released them, it gets no answer to its challenge, and so copies nothing of this side by itself.
    pub(crate) revoked_during_hello: BTreeSet<u32>,
    /// Whether a hello could not name all regions that were revoked before: the peer gets no answer either, however long.
    pub(super) knows_part: bool,
}

/// The number of the process that says that it is at a place, if this one knows it by the same. It lives, as it has just said
/// so: where there is none of this number it is on another host, as clones of a virtual machine have the same boot id.
fn living_beside(theirs: &ProcessPlace, own: &ProcessPlace) -> Option<u32> {
    theirs.pid_beside(own).filter(|pid| !has_ended(*pid))
}

impl Locality {
    pub(super) fn new(is_near: bool, challenge: Challenge, witness: Witness) -> Locality {
        Locality {
            is_near,
            on_this_host: false,
            neighbour: None,
            claimed: None,
            answered_by: None,
            challenge,
            witness,
            unanswered: None,
            takes_revocations: false,
            knows_uses: false,
            revoked_during_hello: BTreeSet::new(),
            knows_part: false,
        }
    }

    /// Takes what the peer's first hello says of its place; `here` is this process's. Returns whether the peer is an older one,
    /// which cannot prove that it is there.
    pub(super) fn learn(&mut self, hello: &Hello, here: Option<&ProcessPlace>) -> bool {
        self.takes_revocations = hello.revocations;
        let places = hello.process.as_ref().zip(here);
        self.on_this_host = places.is_some_and(|(theirs, own)| theirs.shares_host_with(own));
        self.answered_by = hello.seen.and(places).and_then(|(theirs, own)| living_beside(theirs, own));
        // Where UCX would copy its memory by CMA, so may this process itself, with many pieces a call.
        self.claimed = hello.process.clone().filter(|_| self.is_near && !hello.revoked_more);
        hello.challenge.is_none() && self.claimed.take().is_some()
    }

    /// Writes the peer's challenge where the peer looks for it, when it knows which regions are gone.
    pub(crate) fn take_challenge(&mut self, hello: &Hello) {
        self.knows_uses = hello.uses;
        self.revoked_during_hello.retain(|region| can_know(hello.uses, *region));
        self.unanswered = hello.challenge.filter(|_| !self.knows_part);
        self.answer_challenge();
    }

    fn answer_challenge(&mut self) {
        if let Some(challenge) = self.unanswered.take_if(|_| self.revoked_during_hello.is_empty()) {
            self.witness.answer(challenge);
        }
    }

    /// The peer has released a region of this side.
    pub(crate) fn has_released(&mut self, region: u32) {
        if self.revoked_during_hello.remove(&region) {
            self.answer_challenge();
        }
    }

    /// Whether the peer, which has said hello, releases a region of this side when it is asked to.
    pub(crate) fn can_release(&self, region: u32) -> bool {
        self.takes_revocations && can_know(self.knows_uses, region)
    }

    /// Whether the peer's memory is copied as soon as it has proved which process it is.
    pub(crate) fn is_unproved(&self) -> bool {
        self.claimed.is_some()
    }

    /// The peer's process number, if it is known and in this process's PID namespace.
    pub(crate) fn process(&self) -> Option<u32> {
        let proved = || u32::try_from(self.neighbour.as_ref()?.process().0).ok();
        self.answered_by.or_else(proved)
    }

    /// Whether the peer is an agent of this process.
    pub(super) fn is_in_this_process(&self) -> bool {
        self.neighbour.as_ref().is_some_and(|neighbour| u32::try_from(neighbour.process().0) == Ok(std::process::id()))
    }

    /// Checks whether the process at the place that the peer named has answered this side's challenge. A peer that was connected
    /// to by this side has, when it says hello; one that has connected answers when it has this side's hello.
    pub(super) fn find_neighbour(&mut self, (name, incarnation): (&str, Incarnation), own_address: &[u8]) {
        let Some(place) = &self.claimed else { return };
        match Neighbour::find(place, incarnation.0, self.challenge, own_address) {
            Ok(found) => {
                self.claimed = None;
                self.neighbour = found.map(Arc::new);
            }
            // The kernel says so, and will again.
            Err(error) if error.kind() == ErrorKind::Io => {
                self.claimed = None;
                log::warn!("memory of agent {name} on this host goes by messages: {error}");
            }
            Err(error) => log::debug!("memory of agent {name} goes by messages: {error}"),
        }
    }
}

/// Whether a peer can know of a region. Those of releases without `uses` take no such index for a region's, and lose the
/// connection where one is revoked.
fn can_know(knows_uses: bool, region: u32) -> bool {
    knows_uses || (region as usize) < MAX_REGIONS
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn missing_process_is_on_a_clone() {
        let here = ProcessPlace::here().unwrap();
        assert_eq!(living_beside(&here, &here), Some(std::process::id()));
        let mut other = std::process::Command::new("true").spawn().unwrap();
        other.wait().unwrap();
        let there = here.with_pid(other.id());
        assert_eq!((there.pid_beside(&here), living_beside(&there, &here)), (Some(other.id()), None));
    }
}
