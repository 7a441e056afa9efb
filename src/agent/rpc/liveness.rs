//! Whether a peer that owes answers is alive.
//!
//! The kernel reports a process's end by closing its sockets, and UCX by what the kernel reports. Neither does while a child
//! process has the sockets too: one that was forked off, or started without closing what it inherited. So a peer that owes
//! answers and sends nothing is asked for a sign of life, and lost without one.

use std::time::{Duration, Instant};

/// How long a peer that owes an answer may be silent before it is asked.
const QUIET: Duration = Duration::from_secs(5);
/// How long it may take to answer that. A thread that registers memory with a device does nothing else meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

/// A question for a sign of life.
#[derive(Debug, Clone, Copy)]
struct Question {
    /// From when on its answer is waited for.
    since: Instant,
    /// Whether UCX is done with it. Until then it may stand behind much else on a slow link.
    has_left: bool,
}

/// The signs of life of one peer.
#[derive(Debug)]
pub(crate) struct Liveness {
    heard: Instant,
    question: Option<Question>,
}

/// The next step about a peer that owes answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// Nothing: it has been heard lately.
    Short,
    /// Nothing but to wait for its answer.
    Asked,
    /// Ask it for a sign of life.
    Ask,
    /// It has given none for so long.
    Long(Duration),
}

impl Liveness {
    pub(crate) fn new(now: Instant) -> Self {
        Liveness { heard: now, question: None }
    }

    /// Anything came from the peer.
    pub(crate) fn heard(&mut self, now: Instant) {
        *self = Liveness::new(now);
    }

    /// UCX has got something away to the peer: the question too if `is_question`, else what may stand before it.
    pub(crate) fn sent(&mut self, is_question: bool, now: Instant) {
        if let Some(question) = self.question.as_mut().filter(|question| !question.has_left) {
            *question = Question { since: now, has_left: is_question };
        }
    }

    /// The peer was asked.
    pub(crate) fn asked(&mut self, has_left: bool, now: Instant) {
        self.question = Some(Question { since: now, has_left });
    }

    /// This side has stood still: what the peer sent meanwhile may not have been read.
    pub(crate) fn wait_anew(&mut self, now: Instant) {
        if let Some(question) = &mut self.question {
            question.since = now;
        }
    }

    /// How long a peer that owes an answer since `owes` has been silent.
    pub(crate) fn silent(&self, owes: Instant, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard.max(owes))
    }

    /// The state of such a peer.
    pub(crate) fn silence(&self, owes: Instant, now: Instant) -> Silence {
        let silent = self.silent(owes, now);
        match self.question {
            Some(question) if now.saturating_duration_since(question.since) >= PATIENCE => Silence::Long(silent),
            Some(_) => Silence::Asked,
            None if silent >= QUIET => Silence::Ask,
            None => Silence::Short,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_peer_is_asked_then_lost() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut peer = Liveness::new(start);
        // Silence before it owed anything does not count.
        assert_eq!(peer.silence(at(100), at(104)), Silence::Short);
        assert_eq!(peer.silence(at(100), at(105)), Silence::Ask);
        peer.asked(true, at(105));
        assert_eq!(peer.silence(at(100), at(134)), Silence::Asked);
        assert_eq!(peer.silence(at(100), at(135)), Silence::Long(Duration::from_secs(35)));
        // After this side has stood still it gets its time again.
        peer.wait_anew(at(140));
        assert_eq!(peer.silence(at(100), at(169)), Silence::Asked);
        peer.heard(at(169));
        assert_eq!(peer.silence(at(100), at(173)), Silence::Short);
        assert_eq!(peer.silence(at(100), at(174)), Silence::Ask);
    }

    #[test]
    fn question_on_its_way_waits_for_the_link() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut peer = Liveness::new(start);
        peer.asked(false, at(5));
        for seconds in (5..100).step_by(20) {
            peer.sent(false, at(seconds));
            assert_eq!(peer.silence(start, at(seconds + 20)), Silence::Asked);
        }
        peer.sent(true, at(100));
        // What is sent behind it says nothing.
        peer.sent(false, at(120));
        assert_eq!(peer.silence(start, at(130)), Silence::Long(Duration::from_secs(130)));
    }
}
