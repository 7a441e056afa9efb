//! What a want does with the ranks that are connected: heartbeats, reads, and the question whether these hold good.

use super::{Consumer, Kind, Timer, Want};
use crate::plan::Part;
use crate::time::Time;
use crate::wire::{Cause, PeerMessage};
use crate::worker::action::{Action, PeerRef, TransferToken};
use crate::worker::config::ms;
use crate::worker::load::Phase;
use crate::worker::outbox::Outbox;
use crate::worker::sessions::{Session, State, Ticket};

impl Consumer {
    /// Does what the want can do with the ranks that are connected: all of them, or `newly` beside those before it.
    pub(super) fn progress(&mut self, now: Time, ticket: Ticket, newly: Option<u64>, out: &mut Outbox) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let Some(id) = want.session else { return };
        let begun = match &mut want.kind {
            Kind::Release => {
                // The producer's ranks are told together.
                if self.sessions.get(id).is_some_and(|session| session.state == State::Ready) {
                    self.remove(now, ticket, true, out);
                }
                return;
            }
            Kind::Load(load) if load.phase == Phase::Confirming => return,
            Kind::Load(load) if load.failure.is_some() && !want.remote.shared => return,
            // As a hold.
            Kind::Load(load) if load.load.awaits || load.failure.is_some() => None,
            Kind::Load(load) => Some(load.phase != Phase::Waiting),
            Kind::Hold | Kind::Linger => None,
        };
        // Not looked for again with every rank that is connected.
        let needs_all = newly.is_none() || !want.beating || begun == Some(false);
        let connected = if needs_all { self.sessions.connected_of(id) } else { Vec::new() };
        if needs_all && connected.is_empty() {
            return;
        }
        if let Some((_, connected)) = &mut want.handshake {
            connected.get_or_insert(now);
        }
        let newly = newly.map(|connection| vec![connection]);
        let of_these = |before: bool| newly.as_ref().filter(|_| before).unwrap_or(&connected);
        let beating = std::mem::replace(&mut want.beating, true);
        if !beating || newly.is_some() {
            let period = self.config.heartbeat_period(want.remote.lease_ms);
            self.sessions.beat(now, of_these(beating), ticket, &want.leased(), period, out);
        }
        match begun {
            Some(begun) if !begun || newly.is_some() => self.read(now, ticket, of_these(begun), out),
            Some(_) => {}
            None => self.read_portions(now, ticket, out),
        }
    }

    /// Posts what is left of a load's reads from these ranks, one each; none if one of them cannot be planned.
    fn read(&mut self, now: Time, ticket: Ticket, connections: &[u64], out: &mut Outbox) {
        if !self.may_read(now, ticket, out) {
            return;
        }
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        let peers = connections.iter().filter_map(|connection| self.sessions.peer(*connection));
        let part = |connection: &u64| load.reads.get(connection).map_or(Part::Whole, |r| Part::Rest(r.up_to));
        let plans: crate::Result<Vec<_>> = peers
            .map(|peer| Ok((peer.key.clone(), peer.plan.part(&load.load.wanted(), part(&peer.key.connection))?)))
            .collect();
        let posts = match plans {
            Ok(posts) => posts,
            Err(e) => return self.fail(now, ticket, Cause::InvalidRequest, e.message().into(), out),
        };
        if load.phase == Phase::Waiting {
            load.phase = Phase::Reading;
            load.planned(now);
            self.deadlines.set(Timer::Load(ticket), now + ms(self.config.settings.transfer_timeout_ms));
        }
        for (peer, plan) in posts {
            let read = load.read_from(peer.connection);
            read.whole = true;
            if !plan.is_empty() {
                self.next += 1;
                let token = TransferToken(self.next);
                self.tokens.insert(token, ticket);
                out.push(Action::Transfer { token, peer, plan });
                read.in_flight.push(token);
            }
        }
        self.confirm_if_read(now, ticket, out);
    }

    /// Goes on to confirm a load of which nothing is left to read, from any rank.
    pub(super) fn confirm_if_read(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), session: Some(id), .. }) = self.wants.get(&ticket) else { return };
        let read = load.reads.values().filter(|read| read.whole).count();
        let ready = |session: &Session| session.state == State::Ready && read == session.peers.len();
        if !load.load.awaits && load.in_flight().next().is_none() && self.sessions.get(*id).is_some_and(ready) {
            self.confirm(now, ticket, out);
        }
    }

    /// Everything is read: asks the producer whether it still holds good.
    fn confirm(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let more = self.wants.get(&ticket).is_some_and(|want| want.remote.shared) || self.is_wanted_beside(ticket);
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let leased = want.leased();
        let (Kind::Load(load), Some(id)) = (&mut want.kind, want.session) else { return };
        load.phase = Phase::Confirming;
        // Without it, a request that comes for the lease from now on tells the producer at once that it wants it again.
        if !more && std::mem::take(&mut want.beating) {
            self.sessions.stop_beat(id, ticket, &leased);
        }
        let reader = self.sessions.reader();
        for peer in self.sessions.peers_of(id) {
            let message = PeerMessage::Done {
                request: want.remote.request.clone(),
                lease_id: want.remote.lease_id,
                reader: reader.clone(),
                readers: peer.readers,
                serial: ticket,
                more,
            };
            out.send(PeerRef::Outbound(peer.key.clone()), message);
        }
        self.deadlines.set(Timer::Load(ticket), now + ms(self.config.settings.verdict_timeout_ms));
    }
}
