//! Makes peers: of metadata that the owner has, or of a hello that came.

use std::collections::{BTreeMap, BTreeSet};

use super::connection::Connection;
use super::locality::Locality;
use super::peer::{Imports, Peer};
use super::reach::{Reach, reaches_host_memory};
use super::{Io, Peers, tried, two_addresses};
use crate::agent::core::ids::PeerId;
use crate::agent::core::stats::Traffic;
use crate::agent::rpc::flow_control::FlowControl;
use crate::agent::rpc::liveness::Liveness;
use crate::agent::rpc::server::Server;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
use crate::proto::wire::AgentMetadata;
use crate::sys::process::Witness;
use crate::ucx::{self, tells_segments};

/// Peers that may be connected at a time. Engines of a thousand ranks on both sides stay under it; a peer that makes
/// connections without end does not take the process down.
const MAX_PEERS: usize = 16_384;

impl Peers {
    /// The peer that `metadata` describes, connected to now if it was not. `is_copying`: of the peer that has its incarnation.
    pub(crate) fn connect(&mut self, metadata: &AgentMetadata, is_copying: bool, io: &mut Io<'_>) -> Result<PeerId> {
        self.check_open()?;
        metadata.check_regions()?;
        if metadata.name.is_empty() || metadata.name.len() > 256 || metadata.incarnation.0 == 0 {
            return Err(Error::corrupt(format!(
                "agent metadata with a name of {} bytes (expected 1 to 256) and incarnation {} (expected not zero)",
                metadata.name.len(),
                metadata.incarnation
            )));
        }
        if let Some(id) = self.find(metadata.incarnation)
            && self.get(id)?.connection.address != metadata.address
        {
            let error = two_addresses(&metadata.name, metadata.incarnation);
            if self.get(id)?.vouched {
                return Err(error);
            }
            // It came by itself and took this agent's name.
            self.lose(id, error, is_copying, io);
        }
        if let Some(id) = self.find(metadata.incarnation) {
            let peer = self.get_mut(id)?;
            (peer.silent, peer.vouched) = (false, true);
            // Metadata without any is of owners that add regions one by one, and those may be in use.
            if metadata.indexed().next().is_some() {
                peer.update_regions(metadata)?;
            }
            return Ok(id);
        }
        let mut peer = self.make(metadata.name.clone(), metadata.incarnation, &metadata.address, io)?;
        peer.update_regions(metadata)?;
        peer.vouched = true;
        let (id, incarnation) = (peer.id, peer.incarnation);
        self.insert(peer, io.live);
        // The peer takes a new connection for the end of the last one, and of all that was copied over that.
        if !self.closing.is_left_late(incarnation)
            && let Err(error) = self.send_hello(id, None, io)
        {
            self.remove(id, io.live);
            return Err(error);
        }
        Ok(id)
    }

    /// An endpoint to an agent that is not connected to.
    pub(super) fn make(
        &mut self,
        name: String,
        incarnation: Incarnation,
        address: &[u8],
        io: &mut Io<'_>,
    ) -> Result<Peer> {
        if self.len() >= MAX_PEERS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{MAX_PEERS} peers are connected; disconnect those that are not needed"),
            ));
        }
        if !tells_segments(address).map_err(ucx_error)? {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "agent {name} has a UCX address of version 1, which does not tell how long its TCP segments are, so that \
                     what is sent to it could pass their end: expected version 2; unset UCX_ADDRESS_VERSION and \
                     UCX_PROTO_ENABLE there, or update kvferry there"
                ),
            ));
        }
        self.gone.check(&name, incarnation, address)?;
        let endpoint = io.worker.connect(address, &name).map_err(|e| {
            if e.status == ucx::Status::ENDPOINT_TIMEOUT {
                self.gone.note_refused(address);
            }
            ucx_error(e).context(format!("connecting to agent {name} (is it running, and the network open?)"))
        })?;
        // A failed endpoint does not tell any more.
        let lanes = endpoint.describe();
        // UCX takes a millisecond for it. With many ranks to connect to, the first would wait for an answer as long.
        io.worker.progress();
        if let Some(status) = endpoint.failure() {
            return Err(Error::new(
                ErrorKind::Unreachable,
                format!(
                    "connecting to agent {name} (is it running, and the network open?): {status}; {}",
                    tried(&lanes)
                ),
            ));
        }
        let is_near = reaches_host_memory(&endpoint.describe());
        let draw = || {
            getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("drawing a random connection number: {e}")))
        };
        let (number, challenge) = (draw()?, (draw()?, draw()?));
        let id = io.live.ids.peer()?;
        let (own, is_keyed) = (self.local.incarnation, self.are_keyed());
        Ok(Peer {
            id,
            name,
            incarnation,
            connection: Connection::new(id, (own, number), (endpoint, lanes), address, is_keyed),
            locality: Locality::new(is_near, challenge, Witness::new(own.0, address)),
            regions: BTreeMap::new(),
            removed: BTreeSet::new(),
            reach: Reach::default(),
            refused: BTreeSet::new(),
            imports: Imports { are_off: !self.local.device_copies, ..Imports::default() },
            traffic: Traffic::default(),
            server: Server::default(),
            flow: FlowControl::new(io.now),
            liveness: Liveness::new(io.now),
            is_reading: false,
            silent: false,
            vouched: false,
        })
    }
}
