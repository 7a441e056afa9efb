//! Device memory that messages carry: what a device has to do before a request is sent or answered, and when it has done it.

use std::time::Instant;

use super::Engine;
use crate::agent::core::effect::Effect;
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::regions::Hold;
use crate::agent::paths::message;
use crate::agent::rpc::client::Chunk;
use crate::agent::rpc::server::{self, Payload, ReadRequest};
use crate::agent::rpc::staged::{Continuation, Ended};
use crate::agent::rpc::wire::{Piece, read_request, write_request};
use crate::error::Result;

impl Engine {
    /// Goes on with what was on its way between devices and messages. Returns whether there was anything.
    pub(super) fn reap_staged(&mut self, now: Instant) -> bool {
        if !self.staged.is_running() {
            return false;
        }
        let ended = self.staged.reap(|len| self.worker.buffer(len));
        let any = !ended.is_empty();
        self.go_on(ended, now);
        any
    }

    fn go_on(&mut self, ended: Vec<Ended>, now: Instant) {
        for (then, result) in ended {
            match then {
                Continuation::Reply { peer, number, bytes, holds } => {
                    self.has_staged(peer, holds, bytes);
                    if self.reply(peer, FrameKind::ReadReply, number, result.map(Payload::Bytes)) {
                        self.serve_reads(peer);
                    }
                }
                Continuation::Written { peer, number, holds } => {
                    self.has_staged(peer, holds, 0);
                    if self.reply(peer, FrameKind::WriteReply, number, result.map(Payload::Bytes)) {
                        self.serve_reads(peer);
                    }
                }
                Continuation::Digest { peer, number, holds } => {
                    self.has_staged(peer, holds, 0);
                    let digest = result.map(|bytes| Payload::Bytes(iov::digest_of(&bytes).to_vec()));
                    if self.reply(peer, FrameKind::DigestReply, number, digest) {
                        self.serve_reads(peer);
                    }
                }
                Continuation::Ask { chunk, .. } => self.ask_to_write(chunk, result),
                Continuation::Placed(chunk) => self.effects.push(Effect::OperationEnded(chunk.end(result.map(drop)))),
                Continuation::Compare { chunk, theirs } => {
                    let compared = result.and_then(|ours| chunk.compare(&iov::digest_of(&ours), &theirs));
                    self.effects.push(Effect::OperationEnded(chunk.end(compared)));
                }
            }
            self.dispatch(now);
        }
    }

    /// A device has done what a peer asked for with memory of the regions that were held, an answer of so many bytes.
    fn has_staged(&mut self, peer: PeerId, holds: Vec<Hold>, bytes: u64) {
        drop(holds);
        if let Ok(peer) = self.peers.get_mut(peer) {
            peer.server.has_staged();
            peer.server.release(bytes);
        }
    }

    /// Asks a peer to write what a device has brought, unless its transfer was stopped meanwhile.
    fn ask_to_write(&mut self, chunk: Chunk, request: Result<Vec<u8>>) {
        let is_wanted = self.transfers.is_going_on(chunk.transfer);
        let asked = match (request, self.peers.get_mut(chunk.peer)) {
            (Ok(_), _) if !is_wanted => return self.effects.push(Effect::OperationEnded(chunk.cancelled())),
            (Ok(request), Ok(peer)) => {
                let (id, kind) = (peer.id, FrameKind::WriteRequest);
                message::ask(peer, chunk, kind, request, &self.rpc, &mut self.operations).map(|()| id)
            }
            (Err(error), _) | (_, Err(error)) => Err((chunk, error)),
        };
        match asked {
            Ok(peer) => self.peers.note_reading(peer),
            Err((chunk, error)) => self.effects.push(Effect::OperationEnded(chunk.end(Err(error)))),
        }
    }

    /// Has a device copy what a read asked for, for a reply when it has. Whether it does.
    pub(super) fn stage_read(&mut self, id: PeerId, request: &ReadRequest) -> bool {
        let Some((iovs, holds)) = self.locate_on_device(id, &request.pieces) else { return false };
        if !self.begin_staging(id) {
            return true;
        }
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.server.hold(request.bytes);
        }
        let then = Continuation::Reply { peer: id, number: request.chunk, bytes: request.bytes, holds };
        self.staged.read(iovs, then);
        true
    }

    /// Pieces that are of one device's memory, and the peer's uses of it. What is wrong with others is said where they are served.
    fn locate_on_device(&self, id: PeerId, pieces: &[Piece]) -> Option<(Vec<Iov>, Vec<Hold>)> {
        let iovs = server::locate(&self.regions, pieces).ok()?;
        iov::device_of(&iovs)?;
        Some((iovs, server::hold(&self.regions, pieces, id)))
    }

    /// Has a device put in place what a peer writes, for a reply when it has. Whether it does.
    pub(super) fn stage_write(&mut self, id: PeerId, number: u64, data: &[u8]) -> bool {
        let Ok((pieces, bytes)) = write_request(data) else { return false };
        let Some((iovs, holds)) = self.locate_on_device(id, &pieces) else { return false };
        if self.begin_staging(id) {
            self.staged.write(iovs, bytes, Continuation::Written { peer: id, number, holds });
        }
        true
    }

    /// Has a device bring what a peer asks the digest of, for a reply when it has. Whether it does.
    pub(super) fn stage_digest(&mut self, id: PeerId, number: u64, data: &[u8]) -> bool {
        let Ok(pieces) = read_request(data) else { return false };
        let Some((iovs, holds)) = self.locate_on_device(id, &pieces) else { return false };
        if self.begin_staging(id) {
            self.staged.read(iovs, Continuation::Digest { peer: id, number, holds });
        }
        true
    }

    /// Lets a device work for a peer. Else the peer is lost, which has asked for too much.
    fn begin_staging(&mut self, id: PeerId) -> bool {
        let begun = self.peers.get_mut(id).and_then(|peer| peer.server.stage());
        begun.map_err(|error| self.effects.lose(id, error)).is_ok()
    }
}
