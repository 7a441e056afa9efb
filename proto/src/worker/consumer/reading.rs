//! The part of a request that uses connected ranks: heartbeats, reads, and the question whether these count.

use super::{Consumer, ConsumerTimer, RequestKind, RequestRecord};
use crate::plan::LoadPart;
use crate::time::Time;
use crate::wire::{Cause, PeerMessage};
use crate::worker::action::{Action, PeerRef, TransferToken};
use crate::worker::config::ms;
use crate::worker::load::LoadPhase;
use crate::worker::output::MachineOutput;
use crate::worker::sessions::{PeerSession, RequestNumber, SessionState};

impl Consumer {
    /// Does what the request can do with the ranks that are connected: all of them, or `newly` beside those before it.
    pub(super) fn progress(&mut self, now: Time, number: RequestNumber, newly: Option<u64>, out: &mut MachineOutput) {
        let Some(record) = self.records.get_mut(&number) else { return };
        let Some(id) = record.session else { return };
        let begun = match &mut record.kind {
            RequestKind::Release => {
                // The producer's ranks are told together.
                if self.sessions.get(id).is_some_and(|session| session.state == SessionState::Ready) {
                    self.remove(now, number, true, out);
                }
                return;
            }
            RequestKind::Load(load) if load.phase == LoadPhase::Confirming => return,
            RequestKind::Load(load) if load.failure.is_some() && !record.remote.shared => return,
            // As a hold.
            RequestKind::Load(load) if load.load.awaits || load.failure.is_some() => None,
            RequestKind::Load(load) => Some(load.phase != LoadPhase::Waiting),
            RequestKind::Hold | RequestKind::Linger => None,
        };
        // Not looked for again with every rank that is connected.
        let needs_all = newly.is_none() || !record.heartbeats || begun == Some(false);
        let connected = if needs_all { self.sessions.connected_of(id) } else { Vec::new() };
        if needs_all && connected.is_empty() {
            return;
        }
        if let Some((_, connected)) = &mut record.handshake {
            connected.get_or_insert(now);
        }
        let newly = newly.map(|connection| vec![connection]);
        let of_these = |before: bool| newly.as_ref().filter(|_| before).unwrap_or(&connected);
        let heartbeats = std::mem::replace(&mut record.heartbeats, true);
        if !heartbeats || newly.is_some() {
            let period = self.config.heartbeat_period(record.remote.lease_ms);
            self.sessions.start_heartbeats(now, of_these(heartbeats), number, &record.lease_name(), period, out);
        }
        match begun {
            Some(begun) if !begun || newly.is_some() => self.read(now, number, of_these(begun), out),
            Some(_) => {}
            None => self.read_chunks(now, number, out),
        }
    }

    /// Posts what is left of a load's reads from these ranks, one each; none if one of them cannot be planned.
    fn read(&mut self, now: Time, number: RequestNumber, connections: &[u64], out: &mut MachineOutput) {
        if !self.may_read(now, number, out) {
            return;
        }
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get_mut(&number) else { return };
        let peers = connections.iter().filter_map(|connection| self.sessions.peer(*connection));
        let part = |connection: &u64| load.reads.get(connection).map_or(LoadPart::Whole, |r| LoadPart::Rest(r.up_to));
        let plans: crate::Result<Vec<_>> = peers
            .map(|peer| Ok((peer.key.clone(), peer.plan.part(&load.load.wanted(), part(&peer.key.connection))?)))
            .collect();
        let posts = match plans {
            Ok(posts) => posts,
            Err(e) => return self.fail(now, number, Cause::InvalidRequest, e.message().into(), out),
        };
        if load.phase == LoadPhase::Waiting {
            load.phase = LoadPhase::Reading;
            load.planned(now);
            self.deadlines.set(ConsumerTimer::Load(number), now + ms(self.config.settings.transfer_timeout_ms));
        }
        for (peer, plan) in posts {
            let read = load.read_from(peer.connection);
            read.whole = true;
            if !plan.is_empty() {
                self.next += 1;
                let token = TransferToken(self.next);
                self.tokens.insert(token, number);
                out.push(Action::Transfer { token, peer, plan });
                read.in_flight.push(token);
            }
        }
        self.confirm_if_read(now, number, out);
    }

    /// Goes on to confirm a load of which nothing is left to read, from any rank.
    pub(super) fn confirm_if_read(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(RequestRecord { kind: RequestKind::Load(load), session: Some(id), .. }) = self.records.get(&number)
        else {
            return;
        };
        let read = load.reads.values().filter(|read| read.whole).count();
        let ready = |session: &PeerSession| session.state == SessionState::Ready && read == session.peers.len();
        if !load.load.awaits && load.in_flight().next().is_none() && self.sessions.get(*id).is_some_and(ready) {
            self.confirm(now, number, out);
        }
    }

    /// Everything is read: asks the producer whether it still holds good.
    fn confirm(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let more = self.records.get(&number).is_some_and(|record| record.remote.shared)
            || self.is_lease_needed_by_others(number);
        let Some(record) = self.records.get_mut(&number) else { return };
        let lease = record.lease_name();
        let (RequestKind::Load(load), Some(id)) = (&mut record.kind, record.session) else { return };
        load.phase = LoadPhase::Confirming;
        // Without it, a request that comes for the lease from now on tells the producer at once that it wants it again.
        if !more && std::mem::take(&mut record.heartbeats) {
            self.sessions.stop_heartbeats(id, number, &lease);
        }
        let reader = self.sessions.reader();
        for peer in self.sessions.peers_of(id) {
            let message = PeerMessage::Done {
                request: record.remote.request.clone(),
                lease_id: record.remote.lease_id,
                reader: reader.clone(),
                readers: peer.readers,
                serial: number,
                more,
            };
            out.send(PeerRef::Outbound(peer.key.clone()), message);
        }
        self.deadlines.set(ConsumerTimer::Load(number), now + ms(self.config.settings.verdict_timeout_ms));
    }
}
