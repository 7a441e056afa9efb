//! The questions of a client that have no answer yet, and the answers that were not fetched.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::net::host_port;
use crate::net::request::{ClientRequest, RequestPhase, no_answer};
use crate::net::route::ListenerRoute;
use crate::net::sealed::{self, SealedKind};
use crate::proto::wire::{HandshakeReply, Message, RefusalCode};
use crate::secret::Key;

/// The answer to a question.
#[derive(Debug, Clone, PartialEq)]
pub struct HandshakeAnswer {
    /// The id that the question was asked under.
    pub id: u64,
    /// The listener's reply (a refusal included), or why there was none in time.
    pub result: Result<HandshakeReply>,
}

/// The questions by their ids, and the answers.
pub(super) struct Requests {
    /// The key that seals them.
    secret: Option<Key>,
    /// The longest pause before asking again a listener that is not ready.
    retry_max: Duration,
    open: BTreeMap<u64, ClientRequest>,
    answers: VecDeque<HandshakeAnswer>,
}

impl Requests {
    /// None yet.
    pub(super) fn new(secret: Option<Key>, retry_max: Duration) -> Requests {
        Requests { secret, retry_max, open: BTreeMap::new(), answers: VecDeque::new() }
    }

    /// The key that seals them.
    pub(super) fn secret(&self) -> Option<&Key> {
        self.secret.as_ref()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    pub(super) fn insert(&mut self, id: u64, request: ClientRequest) {
        self.open.insert(id, request);
    }

    /// Answers a question that is not among these (any more).
    pub(super) fn answer(&mut self, id: u64, result: Result<HandshakeReply>) {
        self.answers.push_back(HandshakeAnswer { id, result });
    }

    pub(super) fn poll_answer(&mut self) -> Option<HandshakeAnswer> {
        self.answers.pop_front()
    }

    pub(super) fn take_answers(&mut self) -> VecDeque<HandshakeAnswer> {
        std::mem::take(&mut self.answers)
    }

    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    fn any(&self, key: &(String, u16), wanted: impl Fn(&RequestPhase) -> bool) -> bool {
        self.open.values().any(|r| r.key == *key && wanted(&r.phase))
    }

    /// True if any is to `key`.
    pub(super) fn has(&self, key: &(String, u16)) -> bool {
        self.any(key, |_| true)
    }

    pub(super) fn has_unsent(&self, key: &(String, u16)) -> bool {
        self.any(key, |phase| matches!(phase, RequestPhase::Unsent))
    }

    pub(super) fn has_sent(&self, key: &(String, u16)) -> bool {
        self.any(key, |phase| matches!(phase, RequestPhase::Sent(_)))
    }

    /// Those to `key` that are to be sent.
    pub(super) fn unsent(&mut self, key: &(String, u16)) -> impl Iterator<Item = &mut ClientRequest> {
        self.open.values_mut().filter(move |r| r.key == *key && matches!(r.phase, RequestPhase::Unsent))
    }

    /// When the first of those that were sent to `key` has waited for long enough.
    pub(super) fn renew_at(&self, key: &(String, u16)) -> Option<Instant> {
        let sent = self.open.values().filter(|r| r.key == *key);
        sent.filter_map(|r| if let RequestPhase::Sent(at) = r.phase { Some(at + r.answer_timeout) } else { None }).min()
    }

    /// Doubles the answer timeout, up to `most`, of the listener's requests that have exceeded it.
    pub(super) fn wait_longer(&mut self, now: Instant, key: &(String, u16), most: Duration) {
        for r in self.open.values_mut().filter(|r| r.key == *key) {
            if matches!(r.phase, RequestPhase::Sent(at) if at + r.answer_timeout <= now) {
                r.answer_timeout = (r.answer_timeout * 2).min(most);
            }
        }
    }

    /// Requests that were sent to a listener and are not answered.
    pub(super) fn outstanding(&self, key: &(String, u16)) -> usize {
        self.open.values().filter(|r| r.key == *key && matches!(r.phase, RequestPhase::Sent(_))).count()
    }

    /// The times by which [`Requests::expire`] must run.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.open.values().map(|r| match r.phase {
            RequestPhase::Resting(until) => until.min(r.deadline),
            _ => r.deadline,
        })
    }

    /// Makes requests ready to be sent again once their pause is over, and gives up those whose deadline has come.
    /// `route` returns the connection to a listener, if there is one.
    pub(super) fn expire<'a>(&mut self, now: Instant, route: impl Fn(&(String, u16)) -> Option<&'a ListenerRoute>) {
        let mut failed = Vec::new();
        for (id, r) in &mut self.open {
            if let RequestPhase::Resting(until) = r.phase
                && until <= now
                && let Err(e) = r.begin(self.secret.as_ref())
            {
                failed.push((*id, e));
            }
        }
        failed.into_iter().for_each(|(id, e)| self.end(id, Err(e)));
        let late: Vec<u64> = self.open.iter().filter(|(_, r)| r.deadline <= now).map(|(id, _)| *id).collect();
        for id in late {
            let Some(r) = self.open.remove(&id) else { continue };
            let result = r.refusal.clone().map_or_else(|| Err(no_answer(&r, route(&r.key), now)), Ok);
            self.answers.push_back(HandshakeAnswer { id, result });
        }
    }

    /// True if the deadline of a request has passed.
    pub(super) fn has_late(&self, now: Instant) -> bool {
        self.open.values().any(|r| r.deadline <= now)
    }

    /// Makes all requests to `key` ready to be sent by a new socket.
    pub(super) fn ask_again(&mut self, key: &(String, u16)) {
        let mut failed = Vec::new();
        for (id, r) in self.open.iter_mut().filter(|(_, r)| r.key == *key) {
            if !matches!(r.phase, RequestPhase::Resting(_))
                && let Err(e) = r.begin(self.secret.as_ref())
            {
                failed.push((*id, e));
            }
        }
        failed.into_iter().for_each(|(id, e)| self.end(id, Err(e)));
    }

    /// All requests to `key` are over.
    pub(super) fn fail_all(&mut self, key: &(String, u16), error: &Error) {
        let lost: Vec<u64> = self.open.iter().filter(|(_, r)| r.key == *key).map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.end(id, Err(error.clone())));
    }

    /// The request is over.
    pub(super) fn end(&mut self, id: u64, result: Result<HandshakeReply>) {
        if self.open.remove(&id).is_some() {
            self.answers.push_back(HandshakeAnswer { id, result });
        }
    }

    /// Takes a frame that arrived from `key`.
    pub(super) fn judge(&mut self, now: Instant, key: &(String, u16), bytes: &[u8]) {
        if self.secret.is_none() {
            self.judge_clear(now, key, bytes, None);
            return;
        }
        let at = host_port(&key.0, key.1);
        let Some((kind, exchange, message)) = sealed::split(bytes) else {
            let Some(id) = self.oldest(key) else { return };
            if let Some(e) = sealed::check_version(bytes) {
                self.end(id, Err(e.context(format!("what listens on {at} answered"))));
                return;
            }
            let said = match HandshakeReply::from_bytes(bytes) {
                Ok(HandshakeReply::Refused { code: RefusalCode::Version, message, .. }) => {
                    let text = format!("the listener at {at} refused: {message}");
                    self.end(id, Err(Error::new(ErrorKind::VersionMismatch, text)));
                    return;
                }
                Ok(HandshakeReply::Refused { message, .. }) => message,
                _ => "something else than a refusal, which is not looked at".to_owned(),
            };
            let text = format!(
                "the listener at {at} answered a sealed request in clear: {said:?}; both engines need the same key \
                 (key_file, KVFERRY_KEY_FILE)"
            );
            self.end(id, Err(Error::new(ErrorKind::Incompatible, text)));
            return;
        };
        let found = self.open.iter_mut().find(|(_, r)| {
            r.key == *key
                && r.exchange.as_ref().is_some_and(|(n, _)| *n == exchange)
                && matches!(r.phase, RequestPhase::Sent(_))
        });
        let Some((&id, r)) = found else {
            log::debug!("kvferry client: a reply that nobody waits for came from {at}");
            return;
        };
        let Some((_, state)) = r.exchange.as_mut() else { return };
        let step = match kind {
            SealedKind::Opened => state.ask(exchange, message, &r.clear).map(|bytes| {
                r.bytes = bytes;
                r.phase = RequestPhase::Unsent;
            }),
            SealedKind::Reply => match state.reply(message) {
                Ok(clear) => {
                    self.judge_clear(now, key, &clear, Some(id));
                    Ok(())
                }
                Err(e) => Err(e),
            },
            SealedKind::Again => {
                r.phase = RequestPhase::Resting(now + r.rest);
                r.rest = (r.rest * 2).min(self.retry_max);
                Ok(())
            }
            SealedKind::Open | SealedKind::Ask => Err(Error::corrupt("a frame that only clients send")),
        };
        if let Err(e) = step {
            self.end(id, Err(e.context(format!("what listens on {at} answered"))));
        }
    }

    /// The request to `key` that was sent first.
    fn oldest(&self, key: &(String, u16)) -> Option<u64> {
        let sent = self.open.iter().filter(|(_, r)| r.key == *key);
        sent.filter_map(|(id, r)| if let RequestPhase::Sent(at) = r.phase { Some((at, *id)) } else { None })
            .min()
            .map(|(_, id)| id)
    }

    /// Takes a reply in clear. `expected`: the request that it came for, if the channel tells.
    fn judge_clear(&mut self, now: Instant, key: &(String, u16), bytes: &[u8], expected: Option<u64>) {
        let reply = HandshakeReply::from_bytes(bytes);
        let id = reply.as_ref().map_or(0, HandshakeReply::id);
        // A listener that could not read a request cannot name it, but it answers in order: it means the oldest.
        let id = expected.unwrap_or_else(|| if id == 0 { self.oldest(key).unwrap_or(0) } else { id });
        let Some(r) = self.open.get_mut(&id).filter(|r| r.key == *key) else {
            log::debug!("kvferry client: a reply that nobody waits for came from {}", host_port(&key.0, key.1));
            return;
        };
        if let Ok(HandshakeReply::Refused { code: RefusalCode::NotReady, .. }) = &reply
            && now + r.rest < r.deadline
        {
            r.phase = RequestPhase::Resting(now + r.rest);
            r.rest = (r.rest * 2).min(self.retry_max);
            r.refusal = reply.ok();
            return;
        }
        let result = reply.map_err(|e| e.context(format!("what listens on {} answered", host_port(&key.0, key.1))));
        self.open.remove(&id);
        self.answers.push_back(HandshakeAnswer { id, result });
    }
}
