//! The client's half of the handshake.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{HandshakeFailure, HandshakeOutcome};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{EngineId, Incarnation};
use crate::plan::RankIndex;
use crate::wire::{Cause, CompatField, HandshakeReply, Message, RankBlob, RankMetadata, RefusalCode};

/// One query to one engine and what is expected of its reply.
#[derive(Debug, Clone)]
pub struct HandshakeCheck {
    local: Arc<RankMetadata>,
    id: u64,
    engine: EngineId,
    incarnation: Option<Incarnation>,
}

fn fail(cause: Cause, message: impl Into<String>) -> HandshakeFailure {
    HandshakeFailure { cause, message: message.into() }
}

impl HandshakeCheck {
    /// A check for the rank `local` of the reply of `engine`, which is asked for all its ranks. `incarnation` is its
    /// life, if that is known. `id` ties the reply to the query.
    pub fn new(
        local: Arc<RankMetadata>,
        id: u64,
        engine: EngineId,
        incarnation: Option<Incarnation>,
    ) -> HandshakeCheck {
        HandshakeCheck { local, id, engine, incarnation }
    }

    /// Judges a reply. Checks engine, incarnation and ranks, then for each rank the compatibility fields and the
    /// layers that both ranks hold, [`RankIndex::check`]. The engines' shapes may differ. Another incarnation than
    /// the one expected, and nothing else, fails with [`Cause::PeerDied`].
    pub fn judge(&self, reply: HandshakeReply) -> Result<HandshakeOutcome, HandshakeFailure> {
        match reply {
            HandshakeReply::Refused { id, code, message } => Err(self.refused(id, code, &message)),
            HandshakeReply::Pushed { .. } | HandshakeReply::Prefills { .. } => Err(fail(
                Cause::HandshakeFailed,
                format!("engine {} answered a query as if it were something else", self.engine),
            )),
            HandshakeReply::Ranks { id, engine, incarnation, shape, ranks } => {
                self.check_id(id)?;
                if engine != self.engine {
                    return Err(fail(
                        Cause::HandshakeFailed,
                        format!(
                            "engine {:?} was expected, engine {:?} answered; check the host and port in the request's \
                             kv_transfer_params",
                            self.engine.as_str(),
                            engine.as_str()
                        ),
                    ));
                }
                if let Some(expected) = self.incarnation.filter(|expected| *expected != incarnation) {
                    return Err(fail(
                        Cause::PeerDied,
                        format!(
                            "engine {engine} has restarted since it prefilled the request, or its listener's name leads to \
                             another life of it (incarnation {expected} expected, {incarnation} found): the blocks \
                             cannot be reached, prefill the request again"
                        ),
                    ));
                }
                let wrong = |e: Error| fail(cause_of(&e), format!("the answer of engine {engine}'s listener: {e}"));
                shape.validate().map_err(wrong)?;
                let local = RankIndex::new(&self.local);
                let mut decoded = BTreeMap::new();
                let mut notes = BTreeSet::new();
                for RankBlob { rank, metadata } in ranks {
                    let m = RankMetadata::from_bytes(&metadata).map_err(wrong)?;
                    if m.rank != rank || m.engine != engine || m.shape != shape {
                        return Err(fail(
                            Cause::HandshakeFailed,
                            format!(
                                "the listener of engine {engine} ({shape}) gave metadata of rank {} of engine {} ({}) as \
                                 that of rank {rank}",
                                m.rank, m.engine, m.shape
                            ),
                        ));
                    }
                    m.validate().map_err(|e| wrong(e.context(format_args!("rank {rank}"))))?;
                    self.check_rank(&local, &m, &mut notes)?;
                    if decoded.insert(rank, m).is_some() {
                        return Err(fail(Cause::HandshakeFailed, format!("engine {engine} gave rank {rank} twice")));
                    }
                }
                if decoded.len() != shape.ranks() as usize {
                    let text =
                        format!("engine {engine} has {} ranks, its listener gave {}", shape.ranks(), decoded.len());
                    return Err(fail(Cause::HandshakeFailed, text));
                }
                let (ranks, notes) = (decoded.into_values().collect(), notes.into_iter().collect());
                Ok(HandshakeOutcome { engine, incarnation, shape, ranks, notes })
            }
        }
    }

    fn check_id(&self, id: u64) -> Result<(), HandshakeFailure> {
        if id == self.id {
            return Ok(());
        }
        Err(fail(Cause::HandshakeFailed, format!("query {} was answered with the answer to query {id}", self.id)))
    }

    fn refused(&self, id: u64, code: RefusalCode, message: &str) -> HandshakeFailure {
        // 0: the listener could not read the request, so not its id either.
        if let Err(failure) = self.check_id(if id == 0 { self.id } else { id }) {
            return failure;
        }
        let cause = match code {
            RefusalCode::Version => Cause::Incompatible,
            _ => Cause::HandshakeFailed,
        };
        HandshakeFailure { cause, message: format!("the listener of engine {} refused: {message}", self.engine) }
    }

    /// Compares one rank. Differences that are no obstacle go into `notes`.
    fn check_rank(
        &self,
        local: &RankIndex<'_>,
        remote: &RankMetadata,
        notes: &mut BTreeSet<String>,
    ) -> Result<(), HandshakeFailure> {
        let who = format!("engine {} rank {}", remote.engine, remote.rank);
        let mismatch = |text: String| fail(Cause::Incompatible, format!("{who}: {text}"));
        let (here, there) = (by_name(&self.local.compat), by_name(&remote.compat));
        for name in here.keys().chain(there.keys()).collect::<BTreeSet<_>>() {
            match (here.get(name), there.get(name)) {
                (Some(a), Some(b)) if a.value == b.value => {}
                (Some(a), Some(b)) if a.informative && b.informative => {
                    notes.insert(format!("{name} differs: {:?} here, {:?} there", a.value, b.value));
                }
                (a, b) => {
                    let text = |field: Option<&&CompatField>| {
                        field.map_or("missing".into(), |field| format!("{:?}", field.value))
                    };
                    return Err(mismatch(format!(
                        "compatibility field {name:?} differs: {} here, {} there; start both engines with the same \
                         {name}",
                        text(a),
                        text(b)
                    )));
                }
            }
        }
        local.check(&RankIndex::new(remote)).map_err(|e| mismatch(e.message().into()))
    }
}

fn cause_of(error: &Error) -> Cause {
    match error.kind() {
        ErrorKind::Incompatible | ErrorKind::VersionMismatch => Cause::Incompatible,
        _ => Cause::HandshakeFailed,
    }
}

fn by_name(fields: &[CompatField]) -> BTreeMap<&str, &CompatField> {
    fields.iter().map(|field| (field.name.as_str(), field)).collect()
}
