//! Peers that owe answers and send nothing: whether they are alive.

use std::time::{Duration, Instant};

use super::Engine;
use crate::agent::core::ids::PeerId;
use crate::agent::rpc::liveness::Silence;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ended::has_ended;

/// How often the peers that owe answers are checked.
const LOOK: Duration = Duration::from_secs(1);

impl Engine {
    /// Asks silent peers that owe answers for a sign of life, and loses those that are known to be dead or give none.
    pub(super) fn check_silence(&mut self, now: Instant) {
        if now < self.silence_look {
            return;
        }
        // A look that is late by as much was held up by this side, or nobody owed anything until now.
        let is_late = now.saturating_duration_since(self.silence_look) >= LOOK;
        self.silence_look = now + LOOK;
        let debtors = self.rpc.borrow().debtors();
        for (id, owes) in debtors {
            let Ok(peer) = self.peers.get_mut(id) else { continue };
            if is_late {
                peer.liveness.wait_anew(now);
            }
            let silence = peer.liveness.silence(owes, now);
            // UCX is given the time to say so by itself.
            let may_be_dead = peer.liveness.silent(owes, now) >= LOOK;
            if let Some(process) = peer.locality.process().filter(|process| may_be_dead && has_ended(*process)) {
                let text = format!(
                    "process {process} of agent {} has ended; its connections are still open, which a process that it started \
                     keeps",
                    peer.name
                );
                self.effects.lose(id, Error::new(ErrorKind::PeerDied, text));
                continue;
            }
            match silence {
                Silence::Short | Silence::Asked => {}
                Silence::Ask => {
                    if let Err(error) = peer.ask_for_sign_of_life(&mut self.operations, now) {
                        self.effects.lose(id, error);
                    }
                }
                Silence::Long(silent) => {
                    let text = format!(
                        "agent {} owes answers and has been silent for {} s: it was killed while a process that it started \
                         keeps its connections open, it stands still, or the network is gone",
                        peer.name,
                        silent.as_secs()
                    );
                    self.effects.lose(id, Error::new(ErrorKind::PeerDied, text));
                }
            }
        }
    }

    /// When peers are checked again, if any owes an answer.
    pub(super) fn silence_deadline(&self) -> Option<Instant> {
        (!self.rpc.borrow().is_idle()).then_some(self.silence_look)
    }

    /// UCX is done with a question for a sign of life.
    pub(super) fn question_sent(&mut self, id: PeerId, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get_mut(id) else { return };
        match result {
            Ok(()) => peer.liveness.sent(true, now),
            Err(error) => {
                self.effects.lose(id, error.context("a question whether the peer is alive could not be sent"))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{config, drive, read, turn, undriven};
    use super::*;
    use crate::agent::core::event::Event;
    use crate::agent::{AgentConfig, Transport};
    use crate::mem::MemoryRange;

    /// Two engines that no thread drives. The first reads from the other, which does not know it yet.
    struct Pair {
        reader: Engine,
        owner: Engine,
        peer: PeerId,
    }

    impl Pair {
        fn reading(key: Option<&std::path::Path>) -> Pair {
            let make = |number| {
                let config = AgentConfig { key_file: key.map(Into::into), ..config("a", Transport::Tcp) };
                let mut engine = undriven(config, number);
                for _ in 0..3 {
                    engine.register(MemoryRange::leaked(3 * super::super::tests::LEN)).unwrap();
                }
                engine
            };
            let (mut reader, mut owner) = (make(7), make(8));
            let peer = reader.connect(&owner.metadata(), Instant::now()).unwrap();
            drive(&mut reader, |reader| {
                turn(&mut owner);
                reader.peers.get(peer).unwrap().is_ready()
            });
            read(&mut reader, peer);
            drive(&mut reader, |reader| !reader.rpc.borrow().is_idle());
            Pair { reader, owner, peer }
        }

        fn check(&mut self, now: Instant) {
            self.reader.check_silence(now);
            self.reader.dispatch(now);
        }

        fn is_lost(&self) -> bool {
            self.reader.peers.get(self.peer).is_err()
        }
    }

    #[test]
    fn silent_debtor_is_lost() {
        let mut pair = Pair::reading(None);
        let begin = Instant::now();
        let lost_at = (1..100).find(|seconds| {
            pair.check(begin + Duration::from_secs(*seconds));
            pair.is_lost()
        });
        assert!((34..=37).contains(&lost_at.unwrap()), "{lost_at:?}");
        let events = &pair.reader.events;
        let error = events.iter().find_map(|event| match event {
            Event::PeerLost { error, .. } => Some(error),
            _ => None,
        });
        assert_eq!(error.unwrap().kind(), ErrorKind::PeerDied);
        assert!(error.unwrap().message().contains("has been silent for"), "{error:?}");
        assert_eq!(pair.reader.silence_deadline(), None, "nobody owes anything");
    }

    #[test]
    fn pause_of_this_side_is_no_silence() {
        let mut pair = Pair::reading(None);
        let begin = Instant::now();
        for seconds in [1, 2, 3, 4, 5, 6, 300, 301, 329] {
            pair.check(begin + Duration::from_secs(seconds));
            assert!(!pair.is_lost(), "{seconds}");
        }
    }

    #[test]
    fn living_debtor_answers_the_question() {
        let folder = std::env::temp_dir().join(format!("kvferry-silence-{}", std::process::id()));
        std::fs::write(&folder, "7".repeat(64)).unwrap();
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        for key in [None, Some(&*folder)] {
            let mut pair = Pair::reading(key);
            let begin = Instant::now();
            (1..=6).for_each(|seconds| pair.check(begin + Duration::from_secs(seconds)));
            // It answers the reads too, which are then over.
            let Pair { reader, owner, .. } = &mut pair;
            drive(reader, |reader| {
                turn(owner);
                reader.rpc.borrow().is_idle() && reader.worker.in_flight() == 0
            });
            assert_eq!((reader.stats().messages_dropped, owner.stats().messages_dropped), (0, 0));
            let heard = pair.reader.peers.get(pair.peer).unwrap().liveness.silence(begin, Instant::now());
            assert_eq!(heard, Silence::Short);
        }
        std::fs::remove_file(folder).unwrap();
    }
}
