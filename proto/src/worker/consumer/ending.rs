//! The end of a request: a load's one report, and the message that releases the lease.

use super::{Consumer, ConsumerTimer, RequestKind, RequestRecord, same_lease};
use crate::time::Time;
use crate::wire::{Cause, PeerMessage, Remote};
use crate::worker::action::{Action, AwaitId, PeerRef};
use crate::worker::config::ms;
use crate::worker::load::LoadPhase;
use crate::worker::output::MachineOutput;
use crate::worker::sessions::{PeerSession, RequestNumber, SessionState};
use crate::worker::trace::TraceEvent;

impl Consumer {
    /// True if another request needs the lease of this one.
    pub(super) fn is_lease_needed_by_others(&self, number: RequestNumber) -> bool {
        self.records.get(&number).is_some_and(|record| self.is_lease_needed(number, &record.remote))
    }

    /// True if another request than `except` needs the lease.
    fn is_lease_needed(&self, except: RequestNumber, lease: &Remote) -> bool {
        let users = self.users.get(&lease.request);
        let others = users.into_iter().flatten().filter(|number| **number != except);
        others
            .filter_map(|number| self.records.get(number))
            .any(|other| other.needs_lease() && same_lease(lease, &other.remote))
    }

    /// A load has failed: nothing more is posted, what is posted is cancelled, and once that is over the load concludes.
    pub(super) fn fail(
        &mut self,
        now: Time,
        number: RequestNumber,
        cause: Cause,
        message: String,
        out: &mut MachineOutput,
    ) {
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get_mut(&number) else { return };
        if load.failure.is_none() {
            load.failure = Some((cause, message));
            self.deadlines.cancel(&ConsumerTimer::Load(number));
            if load.load.awaits {
                out.push(Action::Forget { number: AwaitId(number) });
            }
            for token in load.in_flight() {
                out.push(Action::Cancel { token });
            }
        }
        if load.in_flight().next().is_none() {
            self.conclude(now, number, out);
        }
    }

    /// The load's one terminal report.
    pub(super) fn conclude(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(record) = self.records.get(&number) else { return };
        let RequestRecord { request, remote, handshake, kind: RequestKind::Load(load), .. } = record else { return };
        let figures = load.record(now, request, remote);
        out.count(|stats| load.count(now, &figures, stats));
        out.trace(|| TraceEvent::RecvEnded {
            number,
            receive: Box::new(load.trace(now, &remote.engine, *handshake, &figures)),
        });
        // One that others may share said that the lease is still needed.
        let producer_knows = load.phase == LoadPhase::Confirming && !remote.shared;
        let gone = matches!(
            load.failure,
            Some((Cause::PeerDied | Cause::HandshakeFailed | Cause::Incompatible | Cause::ShutDown, _))
        );
        out.report.failed_recving.extend(load.recv_failure(request));
        out.report.records.push(figures);
        out.report.finished_recving.push(request.clone());
        let over = matches!(load.failure, Some((Cause::LeaseExpired, _)));
        if producer_knows {
            self.remove(now, number, false, out);
        } else if gone {
            self.remove(now, number, true, out);
        } else if over {
            self.release_lease(now, number, out);
        } else {
            self.release_or_linger(now, number, out);
        }
    }

    /// Ends the request here. The producer is told, unless others need its lease, or may soon.
    pub(super) fn release_or_linger(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(record) = self.records.get(&number) else { return };
        let usable = |session: &PeerSession| session.state != SessionState::Broken;
        let session = record.session.and_then(|id| self.sessions.get(id)).is_some_and(usable);
        if !record.remote.shared || self.closed || !session || self.is_lease_needed_by_others(number) {
            return self.release_lease(now, number, out);
        }
        self.change_kind(now, number, RequestKind::Linger, out);
        self.deadlines.set(ConsumerTimer::Hold(number), now + ms(self.config.shared_grace_ms));
        self.progress(now, number, None, out);
    }

    /// Ends the request here; its record goes on as `kind`.
    fn change_kind(&mut self, now: Time, number: RequestNumber, kind: RequestKind, out: &mut MachineOutput) {
        self.forget_name(number);
        self.deadlines.cancel(&ConsumerTimer::Hold(number));
        self.deadlines.cancel(&ConsumerTimer::Load(number));
        let Some(record) = self.records.get_mut(&number) else { return };
        if matches!(record.kind, RequestKind::Hold) {
            out.trace(|| TraceEvent::RecvReleased { number, request: record.request.clone(), at: now });
        }
        record.kind = kind;
    }

    /// Ends the request here, but tells the producer as soon as there is a session.
    pub(super) fn release_lease(&mut self, now: Time, number: RequestNumber, out: &mut MachineOutput) {
        let Some(record) = self.records.get_mut(&number) else { return };
        let waits = record
            .session
            .and_then(|id| self.sessions.get(id))
            .is_some_and(|session| matches!(session.state, SessionState::Handshaking | SessionState::Connecting));
        if !waits {
            self.remove(now, number, true, out);
            return;
        }
        // It would not keep the lease alive on the ranks that are still to come.
        if let (true, Some(id)) = (std::mem::take(&mut record.heartbeats), record.session) {
            self.sessions.stop_heartbeats(id, number, &record.lease_name());
        }
        self.change_kind(now, number, RequestKind::Release, out);
    }

    fn forget_name(&mut self, number: RequestNumber) {
        if let Some(record) = self.records.get(&number)
            && self.names.get(&record.request) == Some(&number)
        {
            self.names.remove(&record.request);
        }
    }

    /// Forgets a record. `tell`: release the producer's blocks, unless another request of ours still needs them.
    pub(super) fn remove(&mut self, now: Time, number: RequestNumber, tell: bool, out: &mut MachineOutput) {
        let is_hold = self.records.get(&number).is_some_and(|record| matches!(record.kind, RequestKind::Hold));
        self.change_kind(now, number, RequestKind::Release, out);
        let Some(record) = self.records.remove(&number) else { return };
        if let Some(users) = self.users.get_mut(&record.remote.request) {
            users.remove(&number);
            if users.is_empty() {
                self.users.remove(&record.remote.request);
            }
        }
        let Some(id) = record.session else { return };
        if record.heartbeats {
            self.sessions.stop_heartbeats(id, number, &record.lease_name());
        }
        let stays = !self.releases && (is_hold || record.remote.shared);
        if tell && !stays && !self.is_lease_needed(number, &record.remote) {
            let reader = self.sessions.reader();
            for peer in self.sessions.peers_of(id).filter(|peer| peer.is_connected()) {
                let message = PeerMessage::Release {
                    request: record.remote.request.clone(),
                    lease_id: record.remote.lease_id,
                    reader: reader.clone(),
                    readers: peer.readers,
                };
                out.send(PeerRef::Outbound(peer.key.clone()), message);
            }
        }
        self.sessions.leave(now, id, number, out);
    }

    /// Handles a lost session, or the machine's end: a load fails, any other request is forgotten.
    pub(super) fn lose_session(
        &mut self,
        now: Time,
        number: RequestNumber,
        cause: Cause,
        message: String,
        out: &mut MachineOutput,
    ) {
        if matches!(self.records.get(&number), Some(RequestRecord { kind: RequestKind::Load(_), .. })) {
            self.fail(now, number, cause, message, out);
        } else {
            self.remove(now, number, true, out);
        }
    }
}
