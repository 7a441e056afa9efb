//! Loads whose prefill may still be under way: they wait for its end at the producer's listener, and read meanwhile what is
//! written.
//!
//! What is read before the end, the portions, counts under the lease that the listener names with it. The producer grants that
//! lease at the end if the blocks were the request's all the time; it names another one from then on when they were given away
//! meanwhile, and the load starts anew. So the one question at the end, whether the lease holds, judges the portions too.
//!
//! Portions are of the groups that keep all tokens, and end where blocks of both sides end. They take turns: over one connection
//! one is under way at a time, of the load that came first, because a prefill engine computes prompts in about that order, and
//! what it computed first is needed first. What is left of a prefill that is over waits for no portion.

use std::sync::Arc;

use super::{Consumer, Kind, Timer, Want};
use crate::geometry::GroupKind;
use crate::handshake::PrefillNews;
use crate::plan::Part;
use crate::time::Time;
use crate::wire::{Cause, RankMetadata};
use crate::worker::action::{Action, AwaitId, TransferToken};
use crate::worker::config::ms;
use crate::worker::outbox::Outbox;
use crate::worker::sessions::Ticket;

/// The longest portion, in shortest ones, unless blocks of both sides end together more seldom: how long one load's portion keeps
/// another's back.
const LONGEST: u64 = 16;

impl Consumer {
    /// Asks for what is not known of a load yet.
    pub(super) fn await_first(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get(&ticket) else { return };
        if load.load.awaits {
            // A side that asks for no portions is told of nothing before the end.
            let hears = self.config.settings.portion_tokens > 0;
            let limit =
                if hears { self.config.settings.await_timeout_ms } else { self.config.settings.hold_timeout_ms };
            self.deadlines.set(Timer::Load(ticket), now + ms(limit));
            self.await_prefill(ticket, out);
        }
    }

    /// Asks to be told when the prefill is over, or a portion further than it is known to be.
    fn await_prefill(&mut self, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), remote, .. }) = self.wants.get(&ticket) else { return };
        let (start, end) = load.load.tokens;
        let known = if load.life.is_none() { start } else { load.load.remote_tokens.max(start) };
        let least = self.config.settings.portion_tokens;
        let keeps_all = |local: &Arc<RankMetadata>| local.geometry.groups.iter().any(|group| group.kind.keeps_all());
        // A shorter one takes no longer than what it costs to be told of it twice.
        let long = least > 0 && end.saturating_sub(start) >= least;
        let useful = long && known < end && self.local.as_ref().is_some_and(keeps_all);
        let from_tokens = if useful { known.saturating_add(least).min(end) } else { 0 };
        out.push(Action::Await {
            number: AwaitId(ticket),
            engine: remote.engine.clone(),
            host: remote.host.clone(),
            port: remote.port,
            request: remote.request.clone(),
            from_tokens,
        });
    }

    /// What a listener says of the prefill that a load awaits.
    pub(in crate::worker) fn prefilled(
        &mut self,
        now: Time,
        AwaitId(ticket): AwaitId,
        result: Result<PrefillNews, (Cause, String)>,
        out: &mut Outbox,
    ) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let Kind::Load(load) = &mut want.kind else { return };
        if !load.load.awaits || load.failure.is_some() {
            return;
        }
        let news = match result {
            Ok(news) => news,
            Err((cause, message)) => return self.fail(now, ticket, cause, message, out),
        };
        let session = want.session.and_then(|id| self.sessions.get(id));
        let connected_to = session.and_then(|session| session.incarnation).or(want.remote.incarnation);
        if let Some(other) = connected_to.filter(|other| *other != news.incarnation) {
            let text = format!(
                "engine {} restarted: this rank is connected to incarnation {other}, the prefill is of {}",
                want.remote.engine, news.incarnation
            );
            return self.fail(now, ticket, Cause::PeerDied, text, out);
        }
        let (end, tokens) = (load.load.tokens.1, news.prefill.tokens);
        let stateful = |local: &Arc<RankMetadata>| local.geometry.groups.iter().any(|g| g.kind == GroupKind::State);
        let wrong = tokens < end || tokens != end && self.local.as_ref().is_some_and(stateful);
        if news.over && wrong {
            let text = format!(
                "the producer holds {tokens} tokens, {end} are to be loaded; send both engines the same prompt"
            );
            return self.fail(now, ticket, Cause::InvalidRequest, text, out);
        }
        if !news.over && news.prefill.lease_id == 0 {
            let text = "the producer's listener names no lease for a prefill under way".into();
            return self.fail(now, ticket, Cause::InvalidRequest, text, out);
        }
        // What was read of blocks that were given away meanwhile may still be on its way into ours.
        let life = (news.incarnation, news.prefill.lease_id);
        if load.life.is_some_and(|known| known != life) {
            for token in load.start_anew() {
                out.push(Action::Cancel { token });
            }
        }
        load.life = Some(life);
        let PrefillNews { incarnation, prefill, over } = news;
        if !over {
            load.progressed(prefill);
            self.deadlines.set(Timer::Load(ticket), now + ms(self.config.settings.hold_timeout_ms));
            self.await_prefill(ticket, out);
            return self.read_portions(now, ticket, out);
        }
        // Until now heartbeats could not name the lease, and its length was a guess.
        if let (true, Some(id)) = (std::mem::take(&mut want.beating), want.session) {
            self.sessions.stop_beat(id, ticket, &(want.remote.request.clone(), want.remote.lease_id));
        }
        (want.remote.incarnation, want.remote.lease_id) = (Some(incarnation), prefill.lease_id);
        want.remote.lease_ms = prefill.lease_ms;
        load.prefilled(now, prefill);
        if load.void.is_empty() {
            self.deadlines.cancel(&Timer::Load(ticket));
        } else {
            self.deadlines.set(Timer::Load(ticket), now + ms(self.config.settings.transfer_timeout_ms));
        }
        self.progress(now, ticket, None, out);
    }

    /// A read of blocks that were given away is over.
    pub(super) fn voided(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get(&ticket) else { return };
        if load.void.is_empty() {
            // Over every connection: on some the last read of them was over before, and nothing could follow it.
            self.progress(now, ticket, None, out);
        }
    }

    /// What a portion has read is not what the producer had there: it has given the blocks away, or goes on writing behind what
    /// was read. That range is read again when the prefill is over, and no further one before, or the load starts anew.
    pub(super) fn doubt(&mut self, now: Time, ticket: Ticket, token: TransferToken, connection: u64, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        let Some((from, to)) = load.doubt(token) else { return };
        let read = load.read_from(connection);
        if !read.whole {
            read.up_to = from;
            return;
        }
        // All that was left is posted already.
        let Some(peer) = self.sessions.peer(connection).filter(|peer| peer.is_connected()) else { return };
        match peer.plan.part(&load.load.wanted(), Part::Portion(from, to)) {
            Ok(plan) => {
                self.next += 1;
                let token = TransferToken(self.next);
                self.tokens.insert(token, ticket);
                load.read_from(connection).in_flight.push(token);
                out.push(Action::Transfer { token, peer: peer.key.clone(), plan });
            }
            Err(e) => self.fail(now, ticket, Cause::InvalidRequest, e.message().into(), out),
        }
    }

    /// Whether a load may read over its session: if nothing that was given away is on its way into its blocks. One whose
    /// session has come to another life of the engine than its prefill is of fails.
    pub(super) fn may_read(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) -> bool {
        let Some(Want { kind: Kind::Load(load), session: Some(id), .. }) = self.wants.get(&ticket) else {
            return false;
        };
        let connected_to = self.sessions.get(*id).and_then(|session| session.incarnation);
        if let (Some((life, _)), Some(other)) = (load.life, connected_to)
            && life != other
        {
            let text = format!(
                "the prefill is of incarnation {life} of its engine, this rank came to be connected to {other}"
            );
            self.fail(now, ticket, Cause::PeerDied, text, out);
            return false;
        }
        load.void.is_empty()
    }

    /// Posts what can be read of a prefill under way, over each connection that has no portion under way.
    pub(super) fn read_portions(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), session: Some(id), .. }) = self.wants.get(&ticket) else { return };
        if !load.load.awaits || load.life.is_none() {
            return;
        }
        for connection in self.sessions.connected_of(*id) {
            self.read_portion(now, ticket, connection, out);
        }
    }

    /// The portion over this connection is over: the next one is of the load that came first.
    pub(super) fn next_portion(&mut self, now: Time, connection: u64, out: &mut Outbox) {
        let Some(session) = self.sessions.peer(connection).map(|peer| peer.session) else { return };
        for ticket in self.users(session) {
            self.read_portion(now, ticket, connection, out);
        }
    }

    fn read_portion(&mut self, now: Time, ticket: Ticket, connection: u64, out: &mut Outbox) {
        if self.portions.values().any(|other| *other == connection) {
            return;
        }
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get(&ticket) else { return };
        let waits = load.load.awaits && load.failure.is_none() && load.life.is_some() && !load.doubtful;
        if !waits || !self.may_read(now, ticket, out) {
            return;
        }
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        let Some(peer) = self.sessions.peer(connection).filter(|peer| peer.is_connected()) else { return };
        let Some(step) = peer.plan.portion_tokens() else { return };
        let least = self.config.settings.portion_tokens;
        let end = load.load.tokens.1;
        let known = load.load.remote_tokens.min(end);
        let from = load.read_from(connection).up_to;
        let multiple = |tokens: u64| tokens.div_ceil(step).saturating_mul(step);
        let shortest = multiple(from.saturating_add(least.max(1)));
        let longest = from.saturating_add(least.saturating_mul(LONGEST)).max(shortest);
        let to = if known == end && end <= longest { end } else { (known.min(longest) / step * step).max(shortest) };
        if to <= from || to > known {
            return;
        }
        let plan = match peer.plan.part(&load.load.wanted(), Part::Portion(from, to)) {
            Ok(plan) => plan,
            Err(e) => return self.fail(now, ticket, Cause::InvalidRequest, e.message().into(), out),
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
        load.portion(token, (from, to));
        self.tokens.insert(token, ticket);
        self.portions.insert(token, connection);
        out.push(Action::Transfer { token, peer: key, plan });
    }
}
