//! Loads of prefills that may still be under way: they await the end at the producer's listener and read the written chunks.
//!
//! Chunks count under the lease that the listener names with them. The producer grants that lease at the end if the blocks
//! were the request's all the time. If they were given away meanwhile, the listener names another lease and the load starts
//! again. So the one question at the end, whether the lease holds, judges the chunks too.
//!
//! Chunks are of the groups that keep all tokens, and end where blocks of both sides end. They take turns: over one connection
//! one is in flight at a time, of the load that came first, because a prefill engine computes prompts in about that order, and
//! needs them in it. The rest of a prefill that has ended waits for no chunk.

use std::sync::Arc;

use super::{Consumer, ConsumerTimer, RequestKind, RequestRecord};
use crate::geometry::GroupKind;
use crate::handshake::PrefillProgress;
use crate::plan::LoadPart;
use crate::time::Time;
use crate::wire::{Cause, RankMetadata};
use crate::worker::action::{Action, AwaitId, TransferToken};
use crate::worker::config::ms;
use crate::worker::output::MachineOutput;
use crate::worker::sessions::RequestNumber;

/// The longest chunk, in shortest ones, unless blocks of both sides end together more seldom: how long one load's chunk keeps
/// another's back.
const LONGEST: u64 = 16;

impl Consumer {
    /// Asks for what is not known of a load yet.
    pub(super) fn await_prefill_first(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get(&number) else { return };
        if load.load.awaits {
            // A side that asks for no chunks is told of nothing before the end.
            let is_told = self.config.settings.chunk_tokens > 0;
            let limit =
                if is_told { self.config.settings.await_timeout_ms } else { self.config.settings.hold_timeout_ms };
            self.deadlines.set(ConsumerTimer::Load(number), now + ms(limit));
            self.await_prefill(number, out);
        }
    }

    /// Asks to be told when the prefill is over, or a chunk further than it is known to be.
    fn await_prefill(&mut self, number: RequestNumber, out: &mut MachineOutput) {
        let Some(RequestRecord { kind: RequestKind::Load(load), remote, .. }) = self.records.get(&number) else {
            return;
        };
        let (start, end) = load.load.tokens;
        let known = if load.lease.is_none() { start } else { load.load.remote_tokens.max(start) };
        let shortest_chunk = self.config.settings.chunk_tokens;
        let keeps_all = |local: &Arc<RankMetadata>| local.geometry.groups.iter().any(|group| group.kind.keeps_all());
        // A shorter one takes no longer than what it costs to be told of it twice.
        let long = shortest_chunk > 0 && end.saturating_sub(start) >= shortest_chunk;
        let useful = long && known < end && self.local.as_ref().is_some_and(keeps_all);
        let from_tokens = if useful { known.saturating_add(shortest_chunk).min(end) } else { 0 };
        out.push(Action::Await {
            number: AwaitId(number),
            engine: remote.engine.clone(),
            host: remote.host.clone(),
            port: remote.port,
            request: remote.request.clone(),
            from_tokens,
        });
    }

    /// Takes the listener's word on the prefill that a load awaits.
    pub(in crate::worker) fn handle_progress(
        &mut self,
        now: Time,
        AwaitId(number): AwaitId,
        result: Result<PrefillProgress, (Cause, String)>,
        out: &mut MachineOutput,
    ) {
        let Some(record) = self.records.get_mut(&number) else { return };
        let RequestKind::Load(load) = &mut record.kind else { return };
        if !load.load.awaits || load.failure.is_some() {
            return;
        }
        let progress = match result {
            Ok(progress) => progress,
            Err((cause, message)) => return self.fail(now, number, cause, message, out),
        };
        let session = record.session.and_then(|id| self.sessions.get(id));
        let connected_to = session.and_then(|session| session.incarnation).or(record.remote.incarnation);
        if let Some(other) = connected_to.filter(|other| *other != progress.incarnation) {
            let text = format!(
                "engine {} restarted: this rank is connected to incarnation {other}, the prefill is of {}",
                record.remote.engine, progress.incarnation
            );
            return self.fail(now, number, Cause::PeerDied, text, out);
        }
        let (end, tokens) = (load.load.tokens.1, progress.prefill.tokens);
        let stateful = |local: &Arc<RankMetadata>| local.geometry.groups.iter().any(|g| g.kind == GroupKind::State);
        let wrong = tokens < end || tokens != end && self.local.as_ref().is_some_and(stateful);
        if progress.over && wrong {
            let text = format!(
                "the producer holds {tokens} tokens, {end} are to be loaded; send both engines the same prompt"
            );
            return self.fail(now, number, Cause::InvalidRequest, text, out);
        }
        if !progress.over && progress.prefill.lease_id == 0 {
            let text = "the producer's listener names no lease for a prefill under way".into();
            return self.fail(now, number, Cause::InvalidRequest, text, out);
        }
        // What was read of blocks that were given away meanwhile may still be on its way into ours.
        let lease = (progress.incarnation, progress.prefill.lease_id);
        if load.lease.is_some_and(|known| known != lease) {
            for token in load.restart() {
                out.push(Action::Cancel { token });
            }
        }
        load.lease = Some(lease);
        let PrefillProgress { incarnation, prefill, over } = progress;
        if !over {
            load.set_progress(prefill);
            self.deadlines.set(ConsumerTimer::Load(number), now + ms(self.config.settings.hold_timeout_ms));
            self.await_prefill(number, out);
            return self.read_chunks(now, number, out);
        }
        // Until now heartbeats could not name the lease, and its length was a guess.
        if let (true, Some(id)) = (std::mem::take(&mut record.heartbeats), record.session) {
            self.sessions.stop_heartbeats(id, number, &(record.remote.request.clone(), record.remote.lease_id));
        }
        (record.remote.incarnation, record.remote.lease_id) = (Some(incarnation), prefill.lease_id);
        record.remote.lease_ms = prefill.lease_ms;
        load.prefill_ended(now, prefill);
        if load.revoked.is_empty() {
            self.deadlines.cancel(&ConsumerTimer::Load(number));
        } else {
            self.deadlines.set(ConsumerTimer::Load(number), now + ms(self.config.settings.transfer_timeout_ms));
        }
        self.progress(now, number, None, out);
    }

    /// A read of blocks that were given away is over.
    pub(super) fn revoked_read_ended(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get(&number) else { return };
        if load.revoked.is_empty() {
            // Over every connection: on some the last read of them was over before, and nothing could follow it.
            self.progress(now, number, None, out);
        }
    }

    /// A chunk's bytes differ from the producer's: it has given the blocks away, or writes on behind what was read. That range
    /// is read again when the prefill is over, and no further one before, or the load starts again.
    pub(super) fn digest_mismatch(
        &mut self,
        now: Time,
        number: RequestNumber,
        token: TransferToken,
        connection: u64,
        out: &mut MachineOutput,
    ) {
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get_mut(&number) else { return };
        let Some((from, to)) = load.digest_mismatch(token) else { return };
        let read = load.read_from(connection);
        if !read.whole {
            read.up_to = from;
            return;
        }
        // All that was left is posted already.
        let Some(peer) = self.sessions.peer(connection).filter(|peer| peer.is_connected()) else { return };
        match peer.plan.part(&load.load.wanted(), LoadPart::Chunk(from, to)) {
            Ok(plan) => {
                self.next += 1;
                let token = TransferToken(self.next);
                self.tokens.insert(token, number);
                load.read_from(connection).in_flight.push(token);
                out.push(Action::Transfer { token, peer: peer.key.clone(), plan });
            }
            Err(e) => self.fail(now, number, Cause::InvalidRequest, e.message().into(), out),
        }
    }

    /// True if a load may read over its session: if nothing that was given away is on its way into its blocks. One whose
    /// session has come to another life of the engine than its prefill is of fails.
    pub(super) fn may_read(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) -> bool {
        let Some(RequestRecord { kind: RequestKind::Load(load), session: Some(id), .. }) = self.records.get(&number)
        else {
            return false;
        };
        let connected_to = self.sessions.get(*id).and_then(|session| session.incarnation);
        if let (Some((life, _)), Some(other)) = (load.lease, connected_to)
            && life != other
        {
            let text = format!(
                "the prefill is of incarnation {life} of its engine, this rank came to be connected to {other}"
            );
            self.fail(now, number, Cause::PeerDied, text, out);
            return false;
        }
        load.revoked.is_empty()
    }

    /// Posts what can be read of a prefill under way, over each connection that has no chunk under way.
    pub(super) fn read_chunks(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(RequestRecord { kind: RequestKind::Load(load), session: Some(id), .. }) = self.records.get(&number)
        else {
            return;
        };
        if !load.load.awaits || load.lease.is_none() {
            return;
        }
        for connection in self.sessions.connected_of(*id) {
            self.read_chunk(now, number, connection, out);
        }
    }

    /// The chunk over this connection is over: the next one is of the load that came first.
    pub(super) fn next_chunk(&mut self, now: Time, connection: u64, out: &mut MachineOutput) {
        let Some(session) = self.sessions.peer(connection).map(|peer| peer.session) else { return };
        for number in self.users(session) {
            self.read_chunk(now, number, connection, out);
        }
    }

    fn read_chunk(&mut self, now: Time, number: RequestNumber, connection: u64, out: &mut MachineOutput) {
        if self.chunks_in_flight.values().any(|other| *other == connection) {
            return;
        }
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get(&number) else { return };
        let waits = load.load.awaits && load.failure.is_none() && load.lease.is_some() && !load.mismatched;
        if !waits || !self.may_read(now, number, out) {
            return;
        }
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get_mut(&number) else { return };
        let Some(peer) = self.sessions.peer(connection).filter(|peer| peer.is_connected()) else { return };
        let Some(step) = peer.plan.chunk_multiple() else { return };
        let shortest_chunk = self.config.settings.chunk_tokens;
        let end = load.load.tokens.1;
        let known = load.load.remote_tokens.min(end);
        let from = load.read_from(connection).up_to;
        let multiple = |tokens: u64| tokens.div_ceil(step).saturating_mul(step);
        let shortest = multiple(from.saturating_add(shortest_chunk.max(1)));
        let longest = from.saturating_add(shortest_chunk.saturating_mul(LONGEST)).max(shortest);
        let to = if known == end && end <= longest { end } else { (known.min(longest) / step * step).max(shortest) };
        if to <= from || to > known {
            return;
        }
        let plan = match peer.plan.part(&load.load.wanted(), LoadPart::Chunk(from, to)) {
            Ok(plan) => plan,
            Err(e) => return self.fail(now, number, Cause::InvalidRequest, e.message().into(), out),
        };
        let read = load.read_from(connection);
        read.up_to = to;
        if plan.is_empty() {
            return;
        }
        let key = peer.key.clone();
        self.next += 1;
        let token = TransferToken(self.next);
        read.in_flight.push(token);
        load.add_chunk(token, (from, to));
        self.tokens.insert(token, number);
        self.chunks_in_flight.insert(token, connection);
        out.push(Action::Transfer { token, peer: key, plan });
    }
}
