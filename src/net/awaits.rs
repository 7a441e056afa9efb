//! The prefills that a client awaits, by listener: when to ask which question, and what its answer tells.
//!
//! One question names all prefills awaited at a listener. It stays open until one of them is over or far enough. When there is
//! more to await, the client asks again; the listener then answers the older question. It asks again from time to time in any
//! case, so that a listener that has forgotten the question, or is gone, is noticed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::net::host_port;
use crate::proto::handshake::PrefillProgress;
use crate::proto::ids::{EngineId, RequestId};
use crate::proto::wire::limits::{MAX_AWAITED, MAX_QUERY_BYTES};
use crate::proto::wire::{Cause, HandshakeReply, RefusalCode};

/// The time after which an open question is repeated: well before a silent connection is taken for dead.
const AGAIN: Duration = Duration::from_secs(2);
/// How long after an answer about prefills under way the next question waits: a listener that has such an answer to every
/// question must not keep its client busy.
const PAUSE: Duration = Duration::from_millis(1);
/// The time after which a question is repeated that was answered with nothing although no newer one was asked.
const SOON: Duration = Duration::from_millis(200);
/// Unanswered questions at a time: the newest, and the one that it replaces.
const MAX_OPEN: usize = 2;
/// The names in one question take about so much. The oldest go first.
const MAX_NAME_BYTES: usize = MAX_QUERY_BYTES / 2;

/// The result of awaiting a prefill.
#[derive(Debug, Clone, PartialEq)]
pub struct Awaited {
    /// The number that it was awaited under.
    pub number: u64,
    /// How far the prefill is; or why there is none.
    pub result: Result<PrefillProgress, (Cause, String)>,
}

/// A prefill to await.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwaitedPrefill {
    /// The prefill's `transfer_id`.
    pub request: RequestId,
    /// Written tokens from which to answer; 0: when it is over.
    pub from_tokens: u64,
}

/// An engine's listener.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ListenerKey {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) engine: EngineId,
}

#[derive(Debug)]
struct PrefillWait {
    names: BTreeMap<u64, AwaitedPrefill>,
    /// The ids of unanswered questions.
    open: Vec<u64>,
    ask_at: Instant,
    not_before: Instant,
    /// How long an answer may take that is due.
    answer_timeout: Duration,
}

#[derive(Debug, Default)]
pub(super) struct PrefillWaits {
    waits: BTreeMap<ListenerKey, PrefillWait>,
    /// By question.
    places: HashMap<u64, ListenerKey>,
    over: VecDeque<Awaited>,
}

impl PrefillWaits {
    /// Awaits a prefill from now on, until it has been told of once.
    pub(super) fn add(
        &mut self,
        now: Instant,
        number: u64,
        place: ListenerKey,
        awaited: AwaitedPrefill,
        answer_timeout: Duration,
    ) {
        let wait = self.waits.entry(place).or_insert_with(|| PrefillWait {
            names: BTreeMap::new(),
            open: Vec::new(),
            ask_at: now,
            not_before: now,
            answer_timeout,
        });
        wait.names.insert(number, awaited);
        (wait.ask_at, wait.answer_timeout) = (now, answer_timeout);
    }

    /// No longer awaits it.
    pub(super) fn forget(&mut self, number: u64) {
        self.waits.values_mut().for_each(|wait| drop(wait.names.remove(&number)));
        self.over.retain(|awaited| awaited.number != number);
        self.waits.retain(|_, wait| !wait.names.is_empty() || !wait.open.is_empty());
    }

    /// A question that is to be asked now under this `id`, of whom, and until when it must be answered.
    pub(super) fn ask(&mut self, now: Instant, id: u64) -> Option<(ListenerKey, Vec<AwaitedPrefill>, Instant)> {
        self.waits.retain(|_, wait| !wait.is_over(now));
        let (place, wait) = self.waits.iter_mut().find(|(_, wait)| wait.due().is_some_and(|at| at <= now))?;
        let mut room = MAX_NAME_BYTES;
        let mut names: BTreeMap<&RequestId, u64> = BTreeMap::new();
        for AwaitedPrefill { request, from_tokens } in wait.names.values() {
            let Some(left) = room.checked_sub(request.as_str().len()) else { break };
            if names.len() == MAX_AWAITED {
                break;
            }
            room = left;
            // Of several who await it, the one that has to be told first.
            let first = |a: u64, b: u64| if a == 0 || b == 0 { a.max(b) } else { a.min(b) };
            names.entry(request).and_modify(|from| *from = first(*from, *from_tokens)).or_insert(*from_tokens);
        }
        let asked =
            |(request, from_tokens): (&RequestId, u64)| AwaitedPrefill { request: request.clone(), from_tokens };
        let names = names.into_iter().map(asked).collect();
        wait.open.push(id);
        wait.ask_at = now + AGAIN;
        self.places.insert(id, place.clone());
        Some((place.clone(), names, now + wait.answer_timeout))
    }

    /// Takes the answer to a question; gives it back if it is to none of these.
    pub(super) fn answered(
        &mut self,
        now: Instant,
        id: u64,
        result: Result<HandshakeReply>,
    ) -> Option<Result<HandshakeReply>> {
        let Some(place) = self.places.remove(&id) else { return Some(result) };
        let wait = self.waits.get_mut(&place)?;
        wait.open.retain(|open| *open != id);
        let at = host_port(&place.host, place.port);
        let failure = match result {
            Ok(HandshakeReply::Prefills { engine, incarnation, ready, gone, partial, .. })
                if engine == place.engine =>
            {
                let before = wait.names.len();
                let tells = !(ready.is_empty() && gone.is_empty() && partial.is_empty());
                let over = ready.into_iter().map(|prefill| PrefillProgress { incarnation, prefill, over: true });
                let partial = partial.into_iter().map(|prefill| PrefillProgress { incarnation, prefill, over: false });
                for progress in over.chain(partial) {
                    let name = progress.prefill.request.clone();
                    let tokens = (!progress.over).then_some(progress.prefill.tokens);
                    wait.resolve(&name, tokens, &mut self.over, || Ok(progress.clone()));
                    if !progress.over {
                        wait.not_before = now + PAUSE;
                    }
                }
                for name in gone {
                    wait.resolve(&name, None, &mut self.over, || {
                        let text = format!(
                            "engine {engine} keeps nothing for {name}: its prefill ended in another way, or its lease is over"
                        );
                        Err((Cause::LeaseExpired, text))
                    });
                }
                if wait.open.is_empty() {
                    let pause = match wait.names.len() < before {
                        true => Duration::ZERO,
                        // Of what nobody awaits any more.
                        false if tells => PAUSE,
                        false => SOON,
                    };
                    wait.ask_at = wait.ask_at.min(now + pause);
                }
                None
            }
            Ok(HandshakeReply::Refused { code, message, .. }) => {
                let cause = if code == RefusalCode::Version { Cause::Incompatible } else { Cause::HandshakeFailed };
                Some((cause, format!("the listener at {at} refused: {message}")))
            }
            Ok(_) => Some((Cause::HandshakeFailed, format!("the listener at {at} answered something else"))),
            Err(e) => Some((unanswered(&e), e.message().to_owned())),
        };
        if let Some((cause, text)) = failure {
            let text = format!("awaiting a prefill of engine {}: {text}", place.engine);
            for number in std::mem::take(&mut wait.names).into_keys() {
                self.over.push_back(Awaited { number, result: Err((cause, text.clone())) });
            }
        }
        self.waits.retain(|_, wait| !wait.is_over(now));
        None
    }

    /// The next prefill that is over.
    pub(super) fn poll(&mut self) -> Option<Awaited> {
        self.over.pop_front()
    }

    /// When there is something to ask, or to take.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        if !self.over.is_empty() {
            return Some(now);
        }
        self.waits.values().filter_map(PrefillWait::due).min()
    }
}

/// The cause that a question without a usable answer counts under.
pub fn unanswered(error: &Error) -> Cause {
    match error.kind() {
        ErrorKind::VersionMismatch => Cause::Incompatible,
        _ => Cause::HandshakeFailed,
    }
}

impl PrefillWait {
    /// True if nothing of it has to be remembered.
    fn is_over(&self, now: Instant) -> bool {
        self.names.is_empty() && self.open.is_empty() && self.not_before <= now
    }

    fn due(&self) -> Option<Instant> {
        (!self.names.is_empty() && self.open.len() < MAX_OPEN).then_some(self.ask_at.max(self.not_before))
    }

    /// Resolves all waits for this prefill, which has `tokens` tokens written, or is over.
    fn resolve(
        &mut self,
        name: &RequestId,
        tokens: Option<u64>,
        over: &mut VecDeque<Awaited>,
        result: impl Fn() -> Result<PrefillProgress, (Cause, String)>,
    ) {
        self.names.retain(|&number, AwaitedPrefill { request, from_tokens }| {
            let told = request == name && tokens.is_none_or(|tokens| (1..=tokens).contains(from_tokens));
            if told {
                over.push_back(Awaited { number, result: result() });
            }
            !told
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::ids::Incarnation;
    use crate::proto::wire::Prefill;

    const PATIENCE: Duration = Duration::from_secs(27);

    fn name(name: &str) -> RequestId {
        RequestId::new(name).unwrap()
    }

    /// To be told of when it is over.
    fn over(request: &str) -> AwaitedPrefill {
        AwaitedPrefill { request: name(request), from_tokens: 0 }
    }

    fn place(engine: &str) -> ListenerKey {
        ListenerKey { host: "h".into(), port: 1, engine: EngineId::new(engine).unwrap() }
    }

    fn prefill(request: &str) -> Prefill {
        Prefill { request: name(request), blocks: vec![], tokens: 1, lease_ms: 1, lease_id: 1 }
    }

    fn reply(ready: &[&str], gone: &[&str]) -> Result<HandshakeReply> {
        Ok(HandshakeReply::Prefills {
            id: 0,
            engine: EngineId::new("p").unwrap(),
            incarnation: Incarnation(5),
            ready: ready.iter().map(|r| prefill(r)).collect(),
            gone: gone.iter().map(|r| name(r)).collect(),
            partial: vec![],
        })
    }

    /// The names in the question that is asked now, if there is one to ask.
    fn ask(awaits: &mut PrefillWaits, now: Instant, id: u64) -> Option<Vec<String>> {
        let (_, names, deadline) = awaits.ask(now, id)?;
        assert_eq!(deadline, now + PATIENCE);
        Some(names.iter().map(|awaited| awaited.request.to_string()).collect())
    }

    fn good(number: u64, request: &str) -> Option<Awaited> {
        Some(Awaited {
            number,
            result: Ok(PrefillProgress { incarnation: Incarnation(5), prefill: prefill(request), over: true }),
        })
    }

    fn is_idle(awaits: &PrefillWaits, now: Instant) -> bool {
        awaits.waits.is_empty() && awaits.places.is_empty() && awaits.due(now).is_none()
    }

    #[test]
    fn all_that_is_awaited_is_in_one_question() {
        let (mut awaits, now) = (PrefillWaits::default(), Instant::now());
        awaits.add(now, 1, place("p"), over("a"), PATIENCE);
        assert_eq!(ask(&mut awaits, now, 10).unwrap(), ["a"]);
        assert_eq!(ask(&mut awaits, now, 11), None);
        // Two want the same.
        awaits.add(now, 2, place("p"), over("b"), PATIENCE);
        awaits.add(now, 3, place("p"), over("b"), PATIENCE);
        assert_eq!(ask(&mut awaits, now, 11).unwrap(), ["a", "b"]);
        // Two questions are without an answer: the next one waits, for the older one's.
        awaits.add(now, 4, place("p"), over("c"), PATIENCE);
        assert_eq!((ask(&mut awaits, now, 12), awaits.due(now)), (None, None));
        assert!(awaits.answered(now, 10, reply(&[], &[])).is_none());
        assert_eq!(ask(&mut awaits, now, 12).unwrap(), ["a", "b", "c"]);
        assert!(awaits.answered(now, 11, reply(&[], &[])).is_none());
        assert!(awaits.poll().is_none());
        assert!(awaits.answered(now, 12, reply(&["b"], &["c"])).is_none());
        // The second has no use for it any more.
        awaits.forget(3);
        assert_eq!(awaits.poll(), good(2, "b"));
        let gone = awaits.poll().unwrap();
        let (cause, text) = gone.result.unwrap_err();
        assert_eq!((gone.number, cause), (4, Cause::LeaseExpired));
        assert!(text.contains("keeps nothing for c"), "{text}");
        // What is left is asked for at once.
        assert_eq!(ask(&mut awaits, now, 13).unwrap(), ["a"]);
        awaits.forget(1);
        assert!(awaits.answered(now, 13, reply(&["a"], &[])).is_none() && awaits.poll().is_none());
        assert!(is_idle(&awaits, now));
        // An answer to somebody else's question.
        assert_eq!(awaits.answered(now, 99, reply(&[], &[])), Some(reply(&[], &[])));
    }

    #[test]
    fn a_prefill_is_told_of_to_those_for_whom_it_is_far_enough() {
        let (mut awaits, now) = (PrefillWaits::default(), Instant::now());
        let from = |from_tokens| AwaitedPrefill { request: name("a"), from_tokens };
        for (number, from_tokens) in [(1, 0), (2, 30), (3, 20)] {
            awaits.add(now, number, place("p"), from(from_tokens), PATIENCE);
        }
        let asked = awaits.ask(now, 10).unwrap().1;
        assert_eq!(asked, [from(20)], "for the first of them");
        let partial = Prefill { tokens: 25, ..prefill("a") };
        let told = HandshakeReply::Prefills {
            id: 0,
            engine: EngineId::new("p").unwrap(),
            incarnation: Incarnation(5),
            ready: vec![],
            gone: vec![],
            partial: vec![partial.clone()],
        };
        assert!(awaits.answered(now, 10, Ok(told)).is_none());
        let progress = PrefillProgress { incarnation: Incarnation(5), prefill: partial, over: false };
        assert_eq!(awaits.poll(), Some(Awaited { number: 3, result: Ok(progress) }));
        assert_eq!(awaits.poll(), None);
        assert_eq!((awaits.ask(now, 11), awaits.due(now)), (None, Some(now + PAUSE)));
        let now = now + PAUSE;
        assert_eq!(awaits.ask(now, 11).unwrap().1, [from(30)], "for those that are left");
        assert!(awaits.answered(now, 11, reply(&["a"], &[])).is_none());
        assert_eq!([awaits.poll(), awaits.poll()], [good(1, "a"), good(2, "a")]);
        assert!(is_idle(&awaits, now));
    }

    #[test]
    fn news_of_what_is_not_awaited_any_more_delay_no_others() {
        let mut awaits = PrefillWaits::default();
        let now = Instant::now();
        awaits.add(now, 1, place("p"), AwaitedPrefill { request: name("a"), from_tokens: 20 }, PATIENCE);
        awaits.add(now, 2, place("p"), over("b"), PATIENCE);
        assert_eq!(ask(&mut awaits, now, 7), Some(vec!["a".into(), "b".into()]));
        awaits.forget(1);
        let far = HandshakeReply::Prefills {
            id: 0,
            engine: EngineId::new("p").unwrap(),
            incarnation: Incarnation(5),
            ready: vec![],
            gone: vec![],
            partial: vec![Prefill { tokens: 25, ..prefill("a") }],
        };
        assert!(awaits.answered(now, 7, Ok(far)).is_none());
        assert_eq!(awaits.due(now), Some(now + PAUSE));
        assert_eq!(ask(&mut awaits, now + PAUSE, 8), Some(vec!["b".into()]));
    }

    #[test]
    fn a_question_is_asked_anew_from_time_to_time() {
        let (mut awaits, now) = (PrefillWaits::default(), Instant::now());
        awaits.add(now, 1, place("p"), over("a"), PATIENCE);
        ask(&mut awaits, now, 10).unwrap();
        assert_eq!(awaits.due(now), Some(now + AGAIN));
        assert_eq!(ask(&mut awaits, now + AGAIN, 11).unwrap(), ["a"]);
        let later = now + AGAIN;
        assert!(awaits.answered(later, 10, reply(&[], &[])).is_none());
        // The newest is answered with nothing, by a listener that does not let wait: not at once again.
        assert!(awaits.answered(later, 11, reply(&[], &[])).is_none());
        assert_eq!((ask(&mut awaits, later, 12), awaits.due(later)), (None, Some(later + SOON)));
        assert_eq!(ask(&mut awaits, later + SOON, 12).unwrap(), ["a"]);
    }

    #[test]
    fn who_gets_no_answer_fails_by_engine() {
        let (mut awaits, now) = (PrefillWaits::default(), Instant::now());
        awaits.add(now, 1, place("p"), over("a"), PATIENCE);
        awaits.add(now, 2, place("q"), over("a"), PATIENCE);
        let mut asked = [10, 11].map(|id| (awaits.ask(now, id).unwrap().0.engine.to_string(), id));
        asked.sort();
        let [(_, p), (_, q)] = asked;
        let refused =
            HandshakeReply::Refused { id: q, code: RefusalCode::WrongEngine, message: "engine p listens here".into() };
        assert!(awaits.answered(now, q, Ok(refused)).is_none());
        let failed = awaits.poll().unwrap();
        let (cause, text) = failed.result.unwrap_err();
        assert_eq!((failed.number, cause), (2, Cause::HandshakeFailed));
        assert!(text.contains("engine q") && text.contains("engine p listens here"), "{text}");
        assert!(awaits.poll().is_none());
        assert!(awaits.answered(now, p, Err(Error::new(ErrorKind::Timeout, "no answer"))).is_none());
        assert!(awaits.poll().unwrap().result.unwrap_err().1.contains("no answer"));
        // Another protocol version, told by the listener or seen in its answer.
        for (number, older) in [
            (20, Err(Error::new(ErrorKind::VersionMismatch, "version 1"))),
            (21, Ok(HandshakeReply::Refused { id: 0, code: RefusalCode::Version, message: "version 1".into() })),
        ] {
            awaits.add(now, number, place("p"), over("a"), PATIENCE);
            ask(&mut awaits, now, number).unwrap();
            assert!(awaits.answered(now, number, older).is_none());
            assert_eq!(awaits.poll().unwrap().result.unwrap_err().0, Cause::Incompatible);
        }
        assert!(is_idle(&awaits, now));
    }

    #[test]
    fn a_question_has_a_bounded_length() {
        let (mut awaits, now) = (PrefillWaits::default(), Instant::now());
        for number in 0..1000 {
            awaits.add(now, number, place("p"), over(&format!("{number:0>512}")), PATIENCE);
        }
        let asked = ask(&mut awaits, now, 10_000).unwrap();
        assert_eq!(asked.len(), MAX_NAME_BYTES / 512);
        assert!(asked.len() * 512 < MAX_QUERY_BYTES, "the rest of the question has room too");
        assert!(asked.iter().all(|name| name.parse::<u64>().unwrap() < asked.len() as u64), "the oldest first");
        let mut awaits = PrefillWaits::default();
        for number in 0..2000 {
            awaits.add(now, number, place("p"), over(&number.to_string()), PATIENCE);
        }
        assert_eq!(ask(&mut awaits, now, 10_000).unwrap().len(), MAX_AWAITED);
    }
}
