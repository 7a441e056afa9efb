//! The prefills that a client awaits, by listener: which question is to be asked when, and what its answer tells.
//!
//! All that is awaited of a listener is in one question, which stays open until one of the prefills is over. When there is
//! more to await it is asked anew; the listener then answers the older one. It is asked anew from time to time in any
//! case, so that a listener that has forgotten it, or is gone, is noticed.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::net::host_port;
use crate::proto::ids::{EngineId, Incarnation, RequestId};
use crate::proto::wire::limits::MAX_QUERY_BYTES;
use crate::proto::wire::{Cause, HandshakeReply, Prefill};

/// When an open question is asked anew: well before a connection without answers is taken for dead.
const AGAIN: Duration = Duration::from_secs(2);
/// When a question is asked anew that was answered with nothing although no newer one was asked.
const SOON: Duration = Duration::from_millis(200);
/// Unanswered questions at a time: the newest, and the one that it replaces.
const MAX_OPEN: usize = 2;
/// The names in one question take about so much. The oldest go first.
const MAX_NAME_BYTES: usize = MAX_QUERY_BYTES / 2;

/// What became of an awaited prefill.
#[derive(Debug, Clone, PartialEq)]
pub struct Awaited {
    /// The number that it was awaited under.
    pub number: u64,
    /// The prefill and the life of its engine; or why there is none.
    pub result: Result<(Incarnation, Prefill), (Cause, String)>,
}

/// An engine's listener.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) engine: EngineId,
}

#[derive(Debug)]
struct Wait {
    names: BTreeMap<u64, RequestId>,
    /// The ids of unanswered questions.
    open: Vec<u64>,
    ask_at: Instant,
    /// How long an answer may take that is due.
    patience: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Awaits {
    waits: BTreeMap<Place, Wait>,
    /// By question.
    places: HashMap<u64, Place>,
    over: VecDeque<Awaited>,
}

impl Awaits {
    /// Awaits a prefill from now on.
    pub(super) fn add(&mut self, now: Instant, number: u64, place: Place, request: RequestId, patience: Duration) {
        let wait = self.waits.entry(place).or_insert_with(|| Wait {
            names: BTreeMap::new(),
            open: Vec::new(),
            ask_at: now,
            patience,
        });
        wait.names.insert(number, request);
        (wait.ask_at, wait.patience) = (now, patience);
    }

    /// No longer awaits it.
    pub(super) fn forget(&mut self, number: u64) {
        self.waits.values_mut().for_each(|wait| drop(wait.names.remove(&number)));
        self.over.retain(|awaited| awaited.number != number);
        self.waits.retain(|_, wait| !wait.names.is_empty() || !wait.open.is_empty());
    }

    /// A question that is to be asked now under this `id`, of whom, and until when it must be answered.
    pub(super) fn ask(&mut self, now: Instant, id: u64) -> Option<(Place, Vec<RequestId>, Instant)> {
        let (place, wait) = self.waits.iter_mut().find(|(_, wait)| wait.due().is_some_and(|at| at <= now))?;
        let mut room = MAX_NAME_BYTES;
        let mut names = BTreeSet::new();
        for name in wait.names.values() {
            let Some(left) = room.checked_sub(name.as_str().len()) else { break };
            room = left;
            names.insert(name.clone());
        }
        wait.open.push(id);
        wait.ask_at = now + AGAIN;
        self.places.insert(id, place.clone());
        Some((place.clone(), names.into_iter().collect(), now + wait.patience))
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
            Ok(HandshakeReply::Prefills { engine, incarnation, ready, gone, .. }) if engine == place.engine => {
                let before = wait.names.len();
                for prefill in ready {
                    let name = prefill.request.clone();
                    wait.tell(&name, &mut self.over, || Ok((incarnation, prefill.clone())));
                }
                for name in gone {
                    wait.tell(&name, &mut self.over, || {
                        let text = format!(
                            "engine {engine} keeps nothing for {name}: its prefill ended in another way, or its lease is over"
                        );
                        Err((Cause::LeaseExpired, text))
                    });
                }
                if wait.open.is_empty() {
                    let pause = if wait.names.len() < before { Duration::ZERO } else { SOON };
                    wait.ask_at = wait.ask_at.min(now + pause);
                }
                None
            }
            Ok(HandshakeReply::Refused { message, .. }) => Some(format!("the listener at {at} refused: {message}")),
            Ok(_) => Some(Error::corrupt(format!("the listener at {at} answered something else")).message().to_owned()),
            Err(e) => Some(e.message().to_owned()),
        };
        if let Some(text) = failure {
            let text = format!("awaiting a prefill of engine {}: {text}", place.engine);
            for number in std::mem::take(&mut wait.names).into_keys() {
                self.over.push_back(Awaited { number, result: Err((Cause::HandshakeFailed, text.clone())) });
            }
        }
        self.waits.retain(|_, wait| !wait.names.is_empty() || !wait.open.is_empty());
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
        self.waits.values().filter_map(Wait::due).min()
    }
}

impl Wait {
    fn due(&self) -> Option<Instant> {
        (!self.names.is_empty() && self.open.len() < MAX_OPEN).then_some(self.ask_at)
    }

    /// Tells all who await this prefill.
    fn tell(
        &mut self,
        name: &RequestId,
        over: &mut VecDeque<Awaited>,
        result: impl Fn() -> Result<(Incarnation, Prefill), (Cause, String)>,
    ) {
        self.names.retain(|&number, awaited| {
            if awaited == name {
                over.push_back(Awaited { number, result: result() });
            }
            awaited != name
        });
    }
}
