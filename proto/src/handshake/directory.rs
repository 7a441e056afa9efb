//! The listener's half of the handshake: request bytes in, reply bytes out.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_bytes::Bytes;

use super::prefills::{ClientId, PrefillAnswer, Prefills};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{EngineId, Incarnation, RankId, RequestId};
use crate::plan::Holding;
use crate::wire::limits::{MAX_AWAITED, MAX_QUERY_BYTES, MAX_REPLY_BYTES};
use crate::wire::{
    self, EngineShape, HandshakeReply, HandshakeRequest, Message, Prefill, RankMetadata, RefusalCode, Versions, kind,
};

/// The ways in which a listener gets its ranks' metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushes {
    /// The host hands over all metadata itself.
    Refused,
    /// Ranks push theirs.
    Accepted,
}

/// The state of a listener: its engine, every rank's encoded metadata, and awaited prefills. Holds one copy of each
/// rank's bytes, nothing per query, and block ids of the prefills that are announced or whose blocks are kept.
#[derive(Debug, Clone)]
pub struct Directory {
    engine: EngineId,
    incarnation: Incarnation,
    shape: EngineShape,
    pushes: Pushes,
    ranks: BTreeMap<RankId, Vec<u8>>,
    prefills: Prefills,
}

/// A refusal before it has its request's id.
struct Refusal(RefusalCode, String);

impl Refusal {
    fn encode(self, version: u16, id: u64) -> Vec<u8> {
        let Refusal(code, message) = self;
        HandshakeReply::Refused { id, code, message }.to_bytes_in(version).unwrap_or_default()
    }
}

/// [`HandshakeReply::Ranks`] with the blobs borrowed, so that an answer copies each once, into the reply.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum BorrowedReply<'a> {
    Ranks { id: u64, engine: &'a EngineId, incarnation: Incarnation, shape: EngineShape, ranks: Vec<BorrowedBlob<'a>> },
}

#[derive(Serialize)]
struct BorrowedBlob<'a> {
    rank: RankId,
    metadata: &'a Bytes,
}

/// The bytes of a reply beside the blobs: fixed fields, and per rank its id and framing. Generous.
const REPLY_FRAME_BYTES: usize = 1024;
const RANK_FRAME_BYTES: usize = 64;

impl Directory {
    /// A directory without ranks yet.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for a shape with a zero or of more than
    /// [`MAX_RANKS`](crate::wire::limits::MAX_RANKS) ranks, and for
    /// incarnation 0.
    pub fn new(engine: EngineId, incarnation: Incarnation, shape: EngineShape, pushes: Pushes) -> Result<Directory> {
        shape.validate()?;
        if incarnation == Incarnation(0) {
            return Err(Error::invalid("an engine's incarnation is never 0; draw it at random at each start"));
        }
        Ok(Directory { engine, incarnation, shape, pushes, ranks: BTreeMap::new(), prefills: Prefills::default() })
    }

    /// This life of the engine.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// True if every rank has reported, so that queries are answered.
    pub fn is_ready(&self) -> bool {
        self.missing() == 0
    }

    /// Ranks that have not reported yet.
    pub fn missing(&self) -> u32 {
        self.shape.ranks().saturating_sub(u32::try_from(self.ranks.len()).unwrap_or(u32::MAX))
    }

    /// The holdings of every rank, once all have reported.
    pub fn holdings(&self) -> Option<Vec<Holding>> {
        let decode = |bytes: &Vec<u8>| RankMetadata::from_bytes(bytes).ok();
        let ranks = self.is_ready().then(|| self.ranks.values().map(decode).collect::<Option<Vec<_>>>())??;
        Some(ranks.iter().map(|m| Holding::new(m.rank, &m.geometry)).collect())
    }

    /// Takes one rank's encoded `RankMetadata` (message kind `rank_metadata`) and gives its rank. The same bytes
    /// again change nothing.
    ///
    /// Errors: [`ErrorKind::Exhausted`] over [`MAX_RANK_METADATA_BYTES`](crate::wire::limits::MAX_RANK_METADATA_BYTES), [`ErrorKind::Corrupt`] and
    /// [`ErrorKind::VersionMismatch`] for bytes that do not decode, [`ErrorKind::Incompatible`] for another engine,
    /// shape or release, [`ErrorKind::InvalidArgument`] for a rank outside the shape, [`ErrorKind::AlreadyExists`] for other
    /// contents than the rank gave before.
    pub fn offer(&mut self, metadata: Vec<u8>) -> Result<RankId> {
        let (decoded, versions) = RankMetadata::from_sender(&metadata)?;
        if versions != Versions::OURS {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "rank {} of engine {} speaks protocol {versions}, its scheduler side {}; all processes of one engine \
                     need the same kvferry release: install it on every host of the engine and restart the engine",
                    decoded.rank,
                    decoded.engine,
                    Versions::OURS
                ),
            ));
        }
        if decoded.engine != self.engine {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "metadata of rank {} of engine {:?} was brought to the listener of engine {:?}; give all ranks and \
                     the scheduler the same engine id",
                    decoded.rank,
                    decoded.engine.as_str(),
                    self.engine.as_str()
                ),
            ));
        }
        if decoded.shape != self.shape {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "rank {} says that engine {} is {}, the listener was started for {}; give all ranks and the \
                     scheduler the same sizes",
                    decoded.rank, self.engine, decoded.shape, self.shape
                ),
            ));
        }
        decoded.validate().map_err(|e| e.context(format_args!("metadata of rank {}", decoded.rank)))?;
        match self.ranks.get(&decoded.rank) {
            Some(known) if *known == metadata => {}
            Some(_) => {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!(
                        "rank {} of engine {} has given other metadata before; a rank that restarts needs its engine's \
                         scheduler side restarted too, or all ranks started anew and given to it together (renew)",
                        decoded.rank, self.engine
                    ),
                ));
            }
            None => {
                self.ranks.insert(decoded.rank, metadata);
            }
        }
        Ok(decoded.rank)
    }

    /// Replaces the encoded `RankMetadata` of all ranks. Their workers are new and hold the same parts of the cache,
    /// as after the engine has slept. If any gives something else than before, this is another `life` of the engine,
    /// for nothing is left of what it kept for others. Returns whether it is. On an error nothing changes.
    ///
    /// Errors: those of [`Directory::offer`]; [`ErrorKind::InvalidArgument`] when a rank is missing,
    /// [`ErrorKind::Incompatible`] when one holds something else than before.
    pub fn renew(&mut self, ranks: Vec<(RankId, Vec<u8>)>, life: Incarnation) -> Result<bool> {
        let mut new = Directory::new(self.engine.clone(), life, self.shape, self.pushes)?;
        for (rank, metadata) in ranks {
            new.offer_of(rank, metadata)?;
        }
        if !new.is_ready() {
            return Err(Error::invalid(format!(
                "{} of the engine's {} ranks are missing; workers are started anew all together",
                new.missing(),
                self.shape.ranks()
            )));
        }
        if self.is_ready() && self.holdings() != new.holdings() {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!("the ranks of engine {} hold other parts of the cache than before", self.engine),
            ));
        }
        let changes = self.ranks != new.ranks;
        if changes {
            (self.ranks, self.incarnation) = (new.ranks, life);
            // Their blocks were of the life before.
            self.prefills.retract_all();
        }
        Ok(changes)
    }

    /// As [`Directory::offer`], of metadata that is said to be a rank's.
    ///
    /// Errors: those of [`Directory::offer`], [`ErrorKind::InvalidArgument`] for another rank's.
    pub fn offer_of(&mut self, rank: RankId, metadata: Vec<u8>) -> Result<()> {
        let own = self.offer(metadata)?;
        if own != rank {
            return Err(Error::invalid(format!("the metadata given as that of rank {rank} is that of rank {own}")));
        }
        Ok(())
    }

    /// Announces a finished prefill to the clients that await it. Its blocks are kept.
    pub fn prefilled(&mut self, prefill: Prefill) {
        self.prefills.ready(prefill);
    }

    /// Announces the written tokens of a prefill under way to the clients that follow it.
    pub fn prefill_progressed(&mut self, prefill: Prefill) {
        self.prefills.set_written(prefill);
    }

    /// Retracts everything announced about this prefill: its blocks were given away.
    pub fn prefill_retracted(&mut self, request: &RequestId) {
        self.prefills.retract(request);
    }

    /// True if a client follows this prefill's progress.
    pub fn is_followed(&self, request: &RequestId) -> bool {
        self.prefills.is_followed(request)
    }

    /// Tells the clients that await a prefill that nothing is kept of it (any more).
    pub fn prefill_gone(&mut self, request: RequestId) {
        self.prefills.gone(request);
    }

    /// The next answer that was left open by [`Directory::answer_to`], and for whom it is.
    pub fn poll_answer(&mut self) -> Option<(ClientId, Vec<u8>)> {
        let (client, answer) = self.prefills.pop_due()?;
        Some((client, self.encode_answer(answer)))
    }

    /// Answers one request, whatever its bytes are. Empty only if the answer cannot be encoded, which does not happen for lack
    /// of anything in the request. A client that awaits prefills of which none is over or far enough is told so.
    pub fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        self.answer_or_wait(None, request).unwrap_or_default()
    }

    /// As [`Directory::answer`], but `None` where no awaited prefill is over or far enough. It then gets exactly one
    /// answer from [`Directory::poll_answer`]: when one is, or when the same `client` awaits prefills again.
    pub fn answer_to(&mut self, client: &[u8], request: &[u8]) -> Option<Vec<u8>> {
        self.answer_or_wait(Some(client), request)
    }

    fn answer_or_wait(&mut self, client: Option<&[u8]>, bytes: &[u8]) -> Option<Vec<u8>> {
        let (request, version) = match HandshakeRequest::from_sender(bytes) {
            Ok((request, versions)) => (request, versions.common()),
            Err(e) => return Some(unreadable(&e).encode(wire::version_for_answer(bytes), 0)),
        };
        let id = request.id();
        let outcome = match request {
            HandshakeRequest::Query { .. } | HandshakeRequest::Await { .. } if bytes.len() > MAX_QUERY_BYTES => {
                Err(too_long(bytes.len()))
            }
            HandshakeRequest::Query { engine, ranks, .. } => self.query(version, id, engine, &ranks),
            HandshakeRequest::Push { expected, metadata, .. } => self.push(version, id, expected, metadata.into_vec()),
            HandshakeRequest::Await { engine, requests, from_tokens, .. } => match self.check_engine(&engine) {
                Ok(()) if requests.len() > MAX_AWAITED => Err(too_many(requests.len())),
                Ok(()) => {
                    let from = from_tokens.into_iter().chain(std::iter::repeat(0));
                    let answer = self.prefills.ask(client, version, id, requests.into_iter().zip(from).collect())?;
                    Ok(self.encode_answer(answer))
                }
                Err(refusal) => Err(refusal),
            },
        };
        Some(outcome.unwrap_or_else(|refusal| refusal.encode(version, id)))
    }

    fn encode_answer(&self, PrefillAnswer { version, id, ready, gone, partial }: PrefillAnswer) -> Vec<u8> {
        let (engine, incarnation) = (self.engine.clone(), self.incarnation);
        HandshakeReply::Prefills { id, engine, incarnation, ready, gone, partial }
            .to_bytes_in(version)
            .unwrap_or_else(|e| Refusal(RefusalCode::TooLarge, e.message().into()).encode(version, id))
    }

    fn check_engine(&self, wanted: &EngineId) -> Result<(), Refusal> {
        if *wanted == self.engine {
            return Ok(());
        }
        Err(Refusal(
            RefusalCode::WrongEngine,
            format!(
                "engine {:?} was asked for, engine {:?} listens here; check the host and port in the request's \
                 kv_transfer_params",
                wanted.as_str(),
                self.engine.as_str()
            ),
        ))
    }

    fn query(&self, version: u16, id: u64, engine: Option<EngineId>, ranks: &[RankId]) -> Result<Vec<u8>, Refusal> {
        if let Some(wanted) = engine {
            self.check_engine(&wanted)?;
        }
        if let Some(rank) = ranks.iter().find(|rank| !self.shape.contains(**rank)) {
            return Err(Refusal(
                RefusalCode::UnknownRank,
                format!("rank {rank} was asked for, engine {} is {}", self.engine, self.shape),
            ));
        }
        if !self.is_ready() {
            return Err(Refusal(
                RefusalCode::NotReady,
                format!(
                    "engine {} is starting: {} of its {} ranks have not reported yet; try again",
                    self.engine,
                    self.missing(),
                    self.shape.ranks()
                ),
            ));
        }
        let mut asked = BTreeSet::new();
        let mut bytes = REPLY_FRAME_BYTES;
        let mut found = Vec::new();
        let all = ranks.is_empty().then(|| self.ranks.keys());
        for &rank in ranks.iter().chain(all.into_iter().flatten()) {
            if let Some(metadata) = self.ranks.get(&rank).filter(|_| asked.insert(rank)) {
                bytes = bytes.saturating_add(metadata.len()).saturating_add(RANK_FRAME_BYTES);
                found.push(BorrowedBlob { rank, metadata: Bytes::new(metadata) });
            }
        }
        if bytes > MAX_REPLY_BYTES {
            return Err(Refusal(
                RefusalCode::TooLarge,
                format!(
                    "the metadata of {} ranks takes {bytes} bytes, a reply holds {MAX_REPLY_BYTES}; ask for fewer ranks \
                     at once",
                    found.len()
                ),
            ));
        }
        let (engine, incarnation, shape) = (&self.engine, self.incarnation, self.shape);
        wire::encode(
            kind::HANDSHAKE_REPLY,
            version,
            &BorrowedReply::Ranks { id, engine, incarnation, shape, ranks: found },
        )
        .map_err(|e| Refusal(RefusalCode::Malformed, e.message().into()))
    }

    fn push(&mut self, version: u16, id: u64, expected: u32, metadata: Vec<u8>) -> Result<Vec<u8>, Refusal> {
        let refuse = |message: String| Refusal(RefusalCode::Push, message);
        if self.pushes == Pushes::Refused {
            return Err(refuse(format!(
                "the listener of engine {} takes no pushes; start it with pushes on, or hand the metadata over there",
                self.engine
            )));
        }
        if expected != self.shape.ranks() {
            return Err(refuse(format!(
                "a rank expects {expected} ranks in engine {}, its listener was started for {} ({}); give all ranks \
                 and the scheduler the same sizes",
                self.engine,
                self.shape.ranks(),
                self.shape
            )));
        }
        self.offer(metadata).map_err(|e| refuse(e.message().into()))?;
        HandshakeReply::Pushed { id, missing: self.missing() }
            .to_bytes_in(version)
            .map_err(|e| refuse(e.message().into()))
    }
}

fn unreadable(error: &Error) -> Refusal {
    let code = match error.kind() {
        ErrorKind::VersionMismatch => RefusalCode::Version,
        _ => RefusalCode::Malformed,
    };
    Refusal(code, error.message().into())
}

fn too_many(requests: usize) -> Refusal {
    let text = format!("{requests} prefills are awaited in one question, at most {MAX_AWAITED} may be");
    Refusal(RefusalCode::Malformed, text)
}

fn too_long(bytes: usize) -> Refusal {
    Refusal(RefusalCode::Malformed, format!("a query of {bytes} bytes is over the limit of {MAX_QUERY_BYTES}"))
}
