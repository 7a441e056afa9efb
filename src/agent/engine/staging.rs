//! Device memory that messages carry: what a device has to do before a request is sent or answered, and when it has done it.

use std::time::Instant;

use super::Engine;
use crate::agent::core::effect::Effect;
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::core::iov::{self, Iov};
use crate::agent::paths::message;
use crate::agent::rpc::client::Chunk;
use crate::agent::rpc::server::{self, Payload, ReadRequest};
use crate::agent::rpc::staged::{Ended, Then};
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
                Then::Reply { peer, number, bytes, regions } => {
                    self.has_staged(peer, &regions);
                    if let Ok(peer) = self.peers.get_mut(peer) {
                        peer.server.release(bytes);
                    }
                    if self.reply(peer, FrameKind::ReadReply, number, result.map(Payload::Bytes)) {
                        self.serve_reads(peer);
                    }
                }
                Then::Written { peer, number, regions } => {
                    self.has_staged(peer, &regions);
                    if self.reply(peer, FrameKind::WriteReply, number, result.map(Payload::Bytes)) {
                        self.serve_reads(peer);
                    }
                }
                Then::Digest { peer, number, regions } => {
                    self.has_staged(peer, &regions);
                    let digest = result.map(|bytes| Payload::Bytes(iov::digest_of(&bytes).to_vec()));
                    if self.reply(peer, FrameKind::DigestReply, number, digest) {
                        self.serve_reads(peer);
                    }
                }
                Then::Ask { chunk, .. } => self.ask_to_write(chunk, result),
                Then::Placed(chunk) => self.effects.push(Effect::OperationEnded(chunk.end(result.map(drop)))),
                Then::Compare { chunk, theirs } => {
                    let compared = result.and_then(|ours| chunk.compare(&iov::digest_of(&ours), &theirs));
                    self.effects.push(Effect::OperationEnded(chunk.end(compared)));
                }
            }
            self.dispatch(now);
        }
    }

    /// A device has done what a peer asked for with memory of these regions.
    fn has_staged(&mut self, peer: PeerId, regions: &[u32]) {
        self.regions.leave(regions);
        if let Ok(peer) = self.peers.get_mut(peer) {
            peer.server.has_staged();
        }
    }

    /// Asks a peer to write what a device has brought, unless its transfer was stopped meanwhile.
    fn ask_to_write(&mut self, chunk: Chunk, request: Result<Vec<u8>>) {
        let is_wanted = self.transfers.is_going_on(chunk.transfer);
        let asked = match (request, self.peers.get_mut(chunk.peer)) {
            (Ok(_), _) if !is_wanted => return self.effects.push(Effect::OperationEnded(chunk.withdrawn())),
            (Ok(request), Ok(peer)) => {
                let (id, kind) = (peer.id, FrameKind::WriteRequest);
                message::ask(peer, chunk, kind, request, &self.rpc, &mut self.operations, &mut self.regions)
                    .map(|()| id)
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
        let Some((iovs, regions)) = self.locate_on_device(&request.pieces) else { return false };
        if !self.begin_staging(id, &regions) {
            return true;
        }
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.server.hold(request.bytes);
        }
        let then = Then::Reply { peer: id, number: request.chunk, bytes: request.bytes, regions };
        self.staged.read(iovs, then);
        true
    }

    /// Pieces that are of one device's memory, and their regions. What is wrong with others is said where they are served.
    fn locate_on_device(&self, pieces: &[Piece]) -> Option<(Vec<Iov>, Vec<u32>)> {
        let iovs = server::locate(&self.regions, pieces).ok()?;
        iov::device_of(&iovs)?;
        Some((iovs, pieces.iter().map(|piece| piece.region).collect()))
    }

    /// Has a device put in place what a peer writes, for a reply when it has. Whether it does.
    pub(super) fn stage_write(&mut self, id: PeerId, number: u64, data: &[u8]) -> bool {
        let Ok((pieces, bytes)) = write_request(data) else { return false };
        let Some((iovs, regions)) = self.locate_on_device(&pieces) else { return false };
        if self.begin_staging(id, &regions) {
            self.staged.write(iovs, bytes, Then::Written { peer: id, number, regions });
        }
        true
    }

    /// Has a device bring what a peer asks the digest of, for a reply when it has. Whether it does.
    pub(super) fn stage_digest(&mut self, id: PeerId, number: u64, data: &[u8]) -> bool {
        let Ok(pieces) = read_request(data) else { return false };
        let Some((iovs, regions)) = self.locate_on_device(&pieces) else { return false };
        if self.begin_staging(id, &regions) {
            self.staged.read(iovs, Then::Digest { peer: id, number, regions });
        }
        true
    }

    /// Lets a device have these regions for a peer. Else the peer is lost, which has asked for too much.
    fn begin_staging(&mut self, id: PeerId, regions: &[u32]) -> bool {
        let begun = self.peers.get_mut(id).and_then(|peer| peer.server.stage());
        match begun {
            Ok(()) => self.regions.enter(regions),
            Err(error) => {
                self.effects.lose(id, error);
                return false;
            }
        }
        true
    }
}
