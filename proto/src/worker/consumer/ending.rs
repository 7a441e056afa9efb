//! How a want ends: the load's one report, and what the producer is told of the lease.

use super::{Consumer, Kind, Timer, Want, same_lease};
use crate::time::Time;
use crate::wire::{Cause, PeerMessage, Remote};
use crate::worker::action::{Action, AwaitId, PeerRef};
use crate::worker::config::ms;
use crate::worker::life::Life;
use crate::worker::load::Phase;
use crate::worker::outbox::Outbox;
use crate::worker::sessions::{Session, State, Ticket};

impl Consumer {
    /// Whether another want needs the lease of this one.
    pub(super) fn is_wanted_beside(&self, ticket: Ticket) -> bool {
        self.wants.get(&ticket).is_some_and(|want| self.is_wanted(ticket, &want.remote))
    }

    /// Whether another want than `except` needs the lease.
    fn is_wanted(&self, except: Ticket, lease: &Remote) -> bool {
        let users = self.users.get(&lease.request);
        let others = users.into_iter().flatten().filter(|ticket| **ticket != except);
        others
            .filter_map(|ticket| self.wants.get(ticket))
            .any(|other| other.needs_lease() && same_lease(lease, &other.remote))
    }

    /// A load has failed: nothing more is posted, what is posted is cancelled, and once that is over the load concludes.
    pub(super) fn fail(&mut self, now: Time, ticket: Ticket, cause: Cause, message: String, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        if load.failure.is_none() {
            load.failure = Some((cause, message));
            self.deadlines.cancel(&Timer::Load(ticket));
            if load.load.awaits {
                out.push(Action::Forget { number: AwaitId(ticket) });
            }
            for token in load.in_flight() {
                out.push(Action::Cancel { token });
            }
        }
        if load.in_flight().next().is_none() {
            self.conclude(now, ticket, out);
        }
    }

    /// The load's one terminal report.
    pub(super) fn conclude(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get(&ticket) else { return };
        let Want { request, remote, handshake, kind: Kind::Load(load), .. } = want else { return };
        let record = load.record(now, request, remote);
        out.count(|stats| load.count(now, &record, stats));
        out.trace(|| Life::RecvEnded {
            number: ticket,
            receive: Box::new(load.life(now, &remote.engine, *handshake, &record)),
        });
        // One that others may share said that the lease is still needed.
        let told = load.phase == Phase::Confirming && !remote.shared;
        let gone = matches!(
            load.failure,
            Some((Cause::PeerDied | Cause::HandshakeFailed | Cause::Incompatible | Cause::ShutDown, _))
        );
        out.report.failed_recving.extend(load.recv_failure(request));
        out.report.records.push(record);
        out.report.finished_recving.push(request.clone());
        let over = matches!(load.failure, Some((Cause::LeaseExpired, _)));
        if told {
            self.remove(now, ticket, false, out);
        } else if gone {
            self.remove(now, ticket, true, out);
        } else if over {
            self.let_go(now, ticket, out);
        } else {
            self.give_back(now, ticket, out);
        }
    }

    /// The want ends here. The producer is told, unless others need its lease, or may soon.
    pub(super) fn give_back(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get(&ticket) else { return };
        let usable = |session: &Session| session.state != State::Broken;
        let session = want.session.and_then(|id| self.sessions.get(id)).is_some_and(usable);
        if !want.remote.shared || self.closed || !session || self.is_wanted_beside(ticket) {
            return self.let_go(now, ticket, out);
        }
        self.turn_into(now, ticket, Kind::Linger, out);
        self.deadlines.set(Timer::Hold(ticket), now + ms(self.config.shared_grace_ms));
        self.progress(now, ticket, None, out);
    }

    /// The request is over here; its want goes on as `kind`.
    fn turn_into(&mut self, now: Time, ticket: Ticket, kind: Kind, out: &mut Outbox) {
        self.forget_name(ticket);
        self.deadlines.cancel(&Timer::Hold(ticket));
        self.deadlines.cancel(&Timer::Load(ticket));
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        if matches!(want.kind, Kind::Hold) {
            out.trace(|| Life::RecvGivenBack { number: ticket, request: want.request.clone(), at: now });
        }
        want.kind = kind;
    }

    /// The want ends here, but the producer is told, as soon as there is a session.
    pub(super) fn let_go(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let waits = want
            .session
            .and_then(|id| self.sessions.get(id))
            .is_some_and(|session| matches!(session.state, State::Handshaking | State::Connecting));
        if !waits {
            self.remove(now, ticket, true, out);
            return;
        }
        // It would not keep the lease alive on the ranks that are still to come.
        if let (true, Some(id)) = (std::mem::take(&mut want.beating), want.session) {
            self.sessions.stop_beat(id, ticket, &want.leased());
        }
        self.turn_into(now, ticket, Kind::Release, out);
    }

    fn forget_name(&mut self, ticket: Ticket) {
        if let Some(want) = self.wants.get(&ticket)
            && self.names.get(&want.request) == Some(&ticket)
        {
            self.names.remove(&want.request);
        }
    }

    /// Forgets a want. `tell`: release the producer's blocks, unless another request of ours still wants them.
    pub(super) fn remove(&mut self, now: Time, ticket: Ticket, tell: bool, out: &mut Outbox) {
        let is_hold = self.wants.get(&ticket).is_some_and(|want| matches!(want.kind, Kind::Hold));
        self.turn_into(now, ticket, Kind::Release, out);
        let Some(want) = self.wants.remove(&ticket) else { return };
        if let Some(users) = self.users.get_mut(&want.remote.request) {
            users.remove(&ticket);
            if users.is_empty() {
                self.users.remove(&want.remote.request);
            }
        }
        let Some(id) = want.session else { return };
        if want.beating {
            self.sessions.stop_beat(id, ticket, &want.leased());
        }
        let stays = !self.releases && (is_hold || want.remote.shared);
        if tell && !stays && !self.is_wanted(ticket, &want.remote) {
            let reader = self.sessions.reader();
            for peer in self.sessions.peers_of(id).filter(|peer| peer.is_connected()) {
                let message = PeerMessage::Release {
                    request: want.remote.request.clone(),
                    lease_id: want.remote.lease_id,
                    reader: reader.clone(),
                    readers: peer.readers,
                };
                out.send(PeerRef::Outbound(peer.key.clone()), message);
            }
        }
        self.sessions.leave(now, id, ticket, out);
    }

    /// A want that has lost its session, or the machine's end: a load fails, anything else is forgotten.
    pub(super) fn strand(&mut self, now: Time, ticket: Ticket, cause: Cause, message: String, out: &mut Outbox) {
        if matches!(self.wants.get(&ticket), Some(Want { kind: Kind::Load(_), .. })) {
            self.fail(now, ticket, cause, message, out);
        } else {
            self.remove(now, ticket, true, out);
        }
    }
}
