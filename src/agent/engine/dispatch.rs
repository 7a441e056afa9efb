//! What parts cannot do alone: effects are carried out, and what UCX, copy threads and peers bring goes to its part.

use std::time::Instant;

use super::Engine;
use super::revocation::region_of;
use crate::agent::core::effect::{Effect, GivenUp, OperationEnd, TransferEnd};
use crate::agent::core::event::Event;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::request::TransferRequest;
use crate::agent::core::stats::{PathBytes, Traffic};
use crate::agent::paths::{self, one_sided, process_vm};
use crate::agent::peers::reach::MemoryPair;
use crate::agent::rpc::client::{Answered, Service};
use crate::agent::rpc::server::{self, Payload};
use crate::agent::rpc::staged::Continuation;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{MemoryRange, ucx_error};
use crate::proto::plan::Operation;
use crate::proto::wire::MemoryKind;
use crate::ucx::Completion;

impl Engine {
    /// Carries out what parts have noted. To be called before anything more is posted.
    pub(super) fn dispatch(&mut self, now: Instant) {
        while let Some((effect, rest)) = self.effects.pop() {
            self.carry_out(effect, now);
            self.effects.resume(rest);
        }
        self.regions.unmap_unused();
    }

    fn carry_out(&mut self, effect: Effect, now: Instant) {
        match effect {
            Effect::Tell(event) => self.tell(event),
            Effect::PeerReady { peer } => self.peer_ready(peer),
            Effect::LosePeer { peer, error } => {
                let is_copying = self.is_copying(peer);
                let (peers, mut io) = self.peers(now);
                peers.lose(peer, error, is_copying, &mut io);
            }
            Effect::PeerGone { peer, error, given_up } => self.peer_gone(peer, &error, given_up, now),
            Effect::Send { peer, kind, sequence } => {
                self.reply(peer, kind, sequence, Ok(Payload::Bytes(Vec::new())));
            }
            Effect::OperationEnded(end) => self.operation_ended(end, now),
            Effect::Flush { transfer, peer } => self.flush(transfer, peer, now),
            Effect::FlushDevice { transfer } => {
                let end = OperationEnd {
                    transfer,
                    windowed: None,
                    moved: PathBytes::default(),
                    result: self.rdma_flush.flush(),
                };
                self.operation_ended(end, now);
            }
            Effect::TransferStopped { transfer } => {
                self.copy_pool.cancel(transfer, &mut self.effects);
                for chunk in self.staged.cancel(transfer) {
                    self.effects.push(Effect::OperationEnded(chunk.cancelled()));
                }
            }
            Effect::TransferEnded(end) => self.transfer_ended(end, now),
        }
    }

    /// Gives an event to the owner. A message may say that the peer has written here: what it wrote comes first.
    fn tell(&mut self, event: Event) {
        if let Event::Message { peer, .. } = event
            && self
                .peers
                .get(peer)
                .is_ok_and(|peer| peer.is_direct(MemoryPair::Device) || peer.is_direct(MemoryPair::Mixed))
            && let Err(error) = self.rdma_flush.flush()
        {
            let error = error.context("a message came, and what its sender may have written before does not arrive");
            return self.effects.lose(peer, error);
        }
        self.events.push_back(event);
    }

    fn peer_ready(&mut self, id: PeerId) {
        self.transfers.wake(id);
        // Regions that were revoked since this side said hello.
        if let Ok(peer) = self.peers.get(id)
            && peer.locality.on_this_host
            && peer.locality.takes_revocations
        {
            for region in &peer.locality.revoked_during_hello {
                self.effects.send(id, FrameKind::RegionRevoked, u64::from(*region));
            }
        }
        let Ok(peer) = self.peers.get(id) else { return };
        let host = paths::between(peer, MemoryKind::Host, MemoryKind::Host);
        let way = format!("{}; host memory is {host}", peer.connection.endpoint.describe());
        let (name, incarnation, version) = (peer.name.clone(), peer.incarnation, peer.connection.version);
        // A driver knows more of the peer, and says it in one line.
        let level = if self.config.tells_connections { log::Level::Info } else { log::Level::Debug };
        log::log!(
            level,
            "agent {}: connected to agent {name} ({incarnation}) over {way}, protocol {version}",
            self.config.name
        );
        self.events.push_back(Event::PeerConnected { peer: id, name, way, incarnation, version });
    }

    fn peer_gone(&mut self, id: PeerId, error: &Error, given_up: Option<GivenUp>, now: Instant) {
        self.transfers.stop_all_with(id, error, &mut self.effects, now);
        for chunk in self.rpc.borrow_mut().take_all_of(id) {
            self.effects.push(Effect::OperationEnded(chunk.end(Err(error.clone()))));
        }
        self.end_uses(id, given_up, now);
        for chunk in self.staged.forget(id) {
            self.effects.push(Effect::OperationEnded(chunk.end(Err(error.clone()))));
        }
    }

    fn flush(&mut self, transfer: TransferId, peer: PeerId, now: Instant) {
        let flushed = match self.peers.get(peer) {
            Ok(peer) => peer.connection.flush(InFlight::Flush { transfer }, &mut self.operations),
            // Nothing is written any more.
            Err(_) => Ok(false),
        };
        if !matches!(flushed, Ok(true)) {
            let end = OperationEnd { transfer, windowed: None, moved: PathBytes::default(), result: flushed.map(drop) };
            self.operation_ended(end, now);
        }
    }

    /// Makes a transfer whose peer is on this host as a whole, if that takes some microseconds. Returns whether it is over.
    pub(super) fn copy_at_once(&mut self, request: &TransferRequest) -> bool {
        let TransferRequest { id, peer, direction, plan, message, user_data } = request;
        let (peer, direction) = (*peer, *direction);
        if message.is_some() || self.transfers.verifies() || self.peers.find_neighbour(peer).is_err() {
            return false;
        }
        let Ok(known) = self.peers.get(peer) else { return false };
        if !known.is_ready() {
            return false;
        }
        let begin = Instant::now();
        let copied = process_vm::copy_at_once((direction, plan), known, &self.regions, &mut self.copy_pool);
        if copied.is_none() {
            return false;
        }
        let (bytes, operations) = (plan.bytes(), plan.runs());
        self.stats.operations += operations;
        self.count(peer, PathBytes { copied: bytes, ..PathBytes::default() });
        let end = TransferEnd {
            id: *id,
            user_data: *user_data,
            message: None,
            peer,
            direction,
            result: Ok(()),
            bytes,
            operations,
            posted: Some((begin, begin)),
            remote_regions: Vec::new(),
        };
        self.transfer_ended(end, Instant::now());
        true
    }

    /// Counts bytes that were moved, of the agent and of the peer.
    fn count(&mut self, peer: PeerId, moved: PathBytes) {
        self.stats.add(moved);
        if let Some(traffic) = self.peers.traffic(peer) {
            traffic.add(moved);
        }
    }

    /// An operation of a transfer is no longer in flight.
    fn operation_ended(&mut self, end: OperationEnd, now: Instant) {
        let moved = end.moved;
        if let Some(peer) = self.transfers.operation_ended(end, &mut self.effects, now)
            && moved != PathBytes::default()
        {
            self.count(peer, moved);
        }
    }

    fn transfer_ended(&mut self, end: TransferEnd, now: Instant) {
        let TransferEnd {
            id,
            user_data,
            message,
            peer,
            direction,
            mut result,
            bytes,
            operations,
            posted,
            remote_regions,
        } = end;
        if let Some(message) = message {
            if result.is_ok() {
                let (peers, mut io) = self.peers(now);
                let sent = peers.send(peer, message, &mut io);
                result = sent.map_err(|e| e.context("the bytes were moved, but the transfer's message was not sent"));
            } else {
                self.peers.release(peer, Some(message.len()));
            }
        }
        self.shared.live.lock().transfers.remove(&id);
        let moved = Traffic::of(direction, bytes, result.is_ok());
        self.stats.end(&moved);
        if let Some(traffic) = self.peers.traffic(peer) {
            traffic.merge(&moved);
        }
        let (posted_at, all_posted_at) = posted.unwrap_or((now, now));
        if self.config.telemetry && result.is_ok() && posted.is_some() {
            let micros = |to: Instant| u64::try_from((to - posted_at).as_micros()).unwrap_or(u64::MAX);
            self.stats.posting_time.observe(micros(all_posted_at));
            self.stats.transfer_time.observe(micros(now));
        }
        self.events.push_back(Event::TransferDone {
            id,
            user_data,
            peer,
            result,
            bytes,
            operations,
            posted_at,
            all_posted_at,
            finished_at: now,
        });
        if let Ok(known) = self.peers.get_mut(peer) {
            let removed = known.removed_of(&remote_regions).into_iter();
            let unused = removed.filter(|region| !self.transfers.uses(peer, *region));
            unused.for_each(|region| known.forget_removed(region));
        }
    }

    /// Takes the connections that UCX gave up.
    pub(super) fn reap_failed_endpoints(&mut self, now: Instant) {
        while let Some((endpoint, status)) = self.worker.poll_failed_endpoints() {
            self.peers.endpoint_failed(endpoint, status, &mut self.effects);
            self.dispatch(now);
        }
    }

    /// UCX has no lane for this: notes it for what follows. False if the peer is gone, whose operations end that way too.
    fn refuse(&mut self, peer: PeerId, operation: Operation) -> bool {
        let Ok(peer) = self.peers.get_mut(peer) else { return false };
        let local = self.regions.range(operation.local_region).map(MemoryRange::kind);
        // Where a region is gone, posting it again says so.
        if let (Some(local), Some(remote)) = (local, peer.kind(operation.remote_region)) {
            peer.refuse(MemoryPair::of(local, remote), operation.remote_region);
        }
        true
    }

    /// Whether it is a copy of memory of a device that one of this side does not reach.
    fn is_unreached(&self, ended: Option<&InFlight>) -> bool {
        let Some(InFlight::Copy { peer, operation, .. }) = ended else { return false };
        self.peers.get(*peer).is_ok_and(|peer| peer.is_unreached(operation.remote_region))
    }

    /// Takes the operations that UCX has ended.
    pub(super) fn reap_completions(&mut self, now: Instant) {
        while let Some(Completion { token, result, .. }) = self.worker.poll_completion() {
            let ended = self.operations.remove(token);
            let is_refusal =
                result.as_ref().is_err_and(|error| one_sided::is_refusal(error) || self.is_unreached(ended.as_ref()));
            let result = result.map_err(ucx_error);
            match ended {
                Some(InFlight::Copy { transfer, peer, operation }) if is_refusal && self.refuse(peer, operation) => {
                    self.transfers.take_back(transfer, operation, &mut self.effects, now);
                }
                Some(InFlight::Copy { transfer, operation: Operation { len, .. }, .. }) => {
                    let one_sided = if result.is_ok() { len } else { 0 };
                    let moved = PathBytes { one_sided, ..PathBytes::default() };
                    let end = OperationEnd { transfer, windowed: Some(len), moved, result };
                    self.operation_ended(end, now);
                }
                Some(InFlight::Flush { transfer }) => {
                    let end = OperationEnd { transfer, windowed: None, moved: PathBytes::default(), result };
                    self.operation_ended(end, now);
                }
                Some(InFlight::Message { peer, reserved }) => {
                    self.peers.message_ended(peer, reserved, result, &mut self.effects, now);
                }
                Some(InFlight::Rpc { peer, held, holds }) => {
                    drop(holds);
                    self.rpc_sent(peer, held, result, now);
                }
                Some(InFlight::Question { peer }) => self.question_sent(peer, result, now),
                Some(InFlight::Goodbye) => {}
                Some(InFlight::CloseFlush) => self.peers.close_ended(token),
                None => log::error!("agent {}: UCX ended an unknown operation", self.config.name),
            }
            self.dispatch(now);
        }
    }

    /// Takes what the copy threads have done.
    pub(super) fn reap_copies(&mut self, now: Instant) {
        for copied in self.copy_pool.reap() {
            let peer = self.peers.get(copied.peer).ok();
            self.copy_pool.finish(copied, peer.map(|peer| peer.name.as_str()), &mut self.effects);
            self.dispatch(now);
        }
    }

    /// Takes what devices have copied. Returns whether there was anything.
    pub(super) fn reap_device_copies(&mut self, now: Instant) -> bool {
        let any = self.device_copies.reap(&mut self.effects);
        if any {
            self.dispatch(now);
        }
        any
    }

    /// Takes the messages that have arrived.
    pub(super) fn receive_messages(&mut self, now: Instant) {
        let refused = self.worker.refused_announcements();
        if std::mem::replace(&mut self.refused, refused) != refused {
            self.peers.announcements_refused(now);
        }
        while let Some(message) = self.worker.poll_message() {
            let received = self.receive(&message.header, message.data, now);
            self.dispatch(now);
            if let Err(error) = received {
                self.peers.dropped(&error, &mut self.stats, now);
            }
        }
    }

    fn receive(&mut self, header: &[u8], data: Vec<u8>, now: Instant) -> Result<()> {
        let (peers, mut io) = self.peers(now);
        match peers.receive(header, data, &mut io)? {
            Some((id, frame, data)) => self.on_rpc(id, frame, &data, now),
            None => Ok(()),
        }
    }

    /// Takes a request or reply that arrived from a peer over its current connection.
    fn on_rpc(&mut self, id: PeerId, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
        // After a reply nothing more is to be expected, or what is under way tells.
        if server::is_request(frame.kind) {
            self.served_at = Some(now);
        }
        let number = frame.sequence;
        match frame.kind {
            FrameKind::ReadRequest => {
                let pushed = self.peers.get_mut(id)?.server.push(number, data);
                pushed.inspect_err(|error| {
                    if error.kind() == ErrorKind::Exhausted {
                        self.effects.lose(id, error.clone());
                    }
                })?;
                self.serve_reads(id);
            }
            FrameKind::WriteRequest => {
                if !self.stage_write(id, number, data) {
                    let written = server::write(data, &self.regions);
                    self.reply(id, FrameKind::WriteReply, number, written);
                }
            }
            FrameKind::DigestRequest => {
                if !self.stage_digest(id, number, data) {
                    let digest = server::digest(data, &self.regions);
                    self.reply(id, FrameKind::DigestReply, number, digest);
                }
            }
            FrameKind::ReadReply | FrameKind::WriteReply | FrameKind::DigestReply | FrameKind::Refusal => {
                self.on_reply(id, frame, data, now)?;
            }
            FrameKind::RegionRevoked => self.on_revoked(id, region_of(frame)?, now)?,
            FrameKind::RegionReleased => self.on_released(id, region_of(frame)?),
            FrameKind::InUse => {
                // Others cannot.
                if self.peers.get(id).is_ok_and(|peer| peer.locality.is_near || peer.locality.on_this_host) {
                    self.holds.note_use(id);
                }
            }
            // Taken before it comes here.
            FrameKind::Hello | FrameKind::Data | FrameKind::Goodbye => {}
            FrameKind::SealedHello | FrameKind::SealedAnswer | FrameKind::Sealed => {}
        }
        Ok(())
    }

    fn on_reply(&mut self, id: PeerId, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
        if frame.sequence == Frame::SIGN_OF_LIFE {
            // That it came is all that it says.
            return Ok(());
        }
        let answered = self.rpc.borrow_mut().take_reply(id, frame, data)?;
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.flow.arrive(answered.departure, answered.chunk.bytes, now);
            self.peers.note_reading(id);
        }
        let Answered { chunk, result, is_of_device, .. } = answered;
        match chunk.service {
            Service::Digest if is_of_device => {
                // A peer that keeps to the protocol sends a shorter digest.
                let theirs = data.get(..64).unwrap_or(data).to_vec();
                self.staged.read(chunk.local.clone(), Continuation::Compare { chunk, theirs });
            }
            _ if is_of_device => self.staged.write(chunk.local.clone(), data, Continuation::Placed(chunk)),
            _ => self.effects.push(Effect::OperationEnded(chunk.end(result))),
        }
        Ok(())
    }

    /// UCX is done with a request or reply of which `held` bytes were accounted.
    fn rpc_sent(&mut self, id: PeerId, held: u64, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get_mut(id) else { return };
        peer.server.release(held);
        peer.liveness.sent(false, now);
        match result {
            Ok(()) => self.serve_reads(id),
            // The other side would wait for it for ever.
            Err(error) => self.effects.lose(id, error.context("a request or reply could not be sent")),
        }
    }

    /// Replies to reads as long as UCX does not hold too many of this peer's replies.
    pub(super) fn serve_reads(&mut self, id: PeerId) {
        let in_place = !self.peers.are_keyed();
        while let Some(request) = self.peers.get_mut(id).ok().and_then(|peer| peer.server.pop()) {
            if self.stage_read(id, &request) {
                continue;
            }
            let bytes = server::read(&request, id, &self.regions, &self.worker, in_place);
            if !self.reply(id, FrameKind::ReadReply, request.chunk, bytes) {
                return;
            }
        }
    }

    /// Sends a reply, or a refusal that says why there is none; a peer that it cannot be sent to is given up. Returns whether
    /// it was sent.
    pub(super) fn reply(&mut self, id: PeerId, kind: FrameKind, number: u64, reply: Result<Payload>) -> bool {
        let Ok(peer) = self.peers.get_mut(id) else { return false };
        let (kind, payload) = reply.map_or_else(
            |error| {
                let (kind, text) = server::refusal(&error);
                (kind, Payload::Bytes(text))
            },
            |payload| (kind, payload),
        );
        let posted = peer
            .server
            .cost(&payload)
            .and_then(|held| peer.post_rpc(kind, number, payload, held, &mut self.operations));
        posted.map_err(|error| self.effects.lose(id, error)).is_ok()
    }

    /// Whether memory of a peer is being copied by this process or a device, which nothing can end.
    pub(super) fn is_copying(&self, peer: PeerId) -> bool {
        self.copy_pool.is_copying(peer) || self.device_copies.is_copying(peer)
    }

    /// Leaves the peers that are to be left when the copies of their memory have ended.
    fn leave_peers(&mut self, now: Instant) {
        for id in self.peers.leaving() {
            if !self.is_copying(id) {
                let (peers, mut io) = self.peers(now);
                peers.leave(id, &mut io);
            }
        }
    }

    /// Does what is due by the clock.
    pub(super) fn check_timers(&mut self, now: Instant) {
        self.leave_peers(now);
        self.peers.check_deadlines(&self.operations, &mut self.effects, now);
        self.transfers.check_deadlines(&mut self.effects, now);
        self.check_silence(now);
        self.check_holders(now);
        self.release_unused();
        self.dispatch(now);
        self.check_data_port(now);
    }

    /// When something is due by the clock.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let timers = [
            self.peers.deadline(),
            self.transfers.deadline(),
            self.regions.deadline(),
            self.holds.deadline(),
            self.silence_deadline(),
            self.data_port.deadline(),
        ];
        timers.into_iter().flatten().min()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{config, drive, other, reader, turn, undriven};
    use super::*;
    use crate::agent::Transport;
    use crate::agent::rpc::wire::encode_pieces;
    use crate::proto::ids::Incarnation;

    #[test]
    fn held_messages_count_until_they_are_due() {
        let other = other(Transport::Tcp);
        let (mut engine, id) = reader(Transport::Tcp, &other);
        let (incarnation, connection) = engine.peers.get(id).unwrap().identity().unwrap();
        let receive = |engine: &mut Engine, sequence: u64, len: usize| {
            let frame = Frame { kind: FrameKind::Data, incarnation, connection, sequence };
            engine.receive(&frame.encode(), vec![0; len], Instant::now()).unwrap();
            engine.peers.held_bytes()
        };
        assert_eq!([(1, 5), (2, 7), (0, 3), (4, 9)].map(|(at, len)| receive(&mut engine, at, len)), [5, 12, 0, 9]);
        engine.disconnect(id, Instant::now()).unwrap();
        assert_eq!(engine.peers.held_bytes(), 0);
    }

    /// Engines that no thread drives: the other one reads nothing from the moment on at which nobody turns it.
    #[test]
    fn peer_that_takes_no_answers_is_given_up() {
        let make = |number| undriven(config("a", Transport::Tcp), number);
        for kind in [FrameKind::DigestRequest, FrameKind::WriteRequest, FrameKind::ReadRequest] {
            let (mut owner, mut other) = (make(7), make(8));
            let id = owner.connect(&other.metadata(), Instant::now()).unwrap();
            drive(&mut owner, |owner| {
                turn(&mut other);
                owner.peers.get(id).unwrap().is_ready()
            });
            // No piece: as little as a request can ask for.
            let nothing = encode_pieces(&[], 0);
            let (mut asked, connection) = (0, owner.peers.get(id).unwrap().connection.remote.unwrap());
            while owner.peers.get(id).is_ok() {
                let frame = Frame { kind, incarnation: Incarnation(8), connection, sequence: asked };
                let _ = owner.on_rpc(id, frame, &nothing, Instant::now());
                owner.dispatch(Instant::now());
                asked += 1;
                assert!(asked < 1_000_000, "{kind:?}: a million answers wait");
            }
        }
    }
}
