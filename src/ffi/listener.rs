//! `kvf_listener_*`: the handshake listener alone.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;

use super::boundary::{Out, slice};
use super::buffer::{self, kvf_buffer};
use super::handle::{self, Object};
use super::log;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{self, AuthLayer, ListenerConfig};
use crate::proto::handshake::{Directory, Pushes};
use crate::proto::ids::{EngineId, Incarnation};
use crate::proto::wire::EngineShape;
use crate::secret::Key;
use crate::settings::{Component, parse_config};

/// A handshake listener. Opaque.
pub struct kvf_listener {
    _opaque: (),
}

struct ListenerObject {
    listener: Mutex<net::Listener>,
    directory: Arc<Mutex<Directory>>,
}

impl Object for ListenerObject {
    type C = kvf_listener;
    const NOUN: &'static str = "listener";
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListenerOptions {
    engine_id: EngineId,
    tp_size: u32,
    pp_size: u32,
    dcp_size: u32,
    host: Option<String>,
    bind: Option<String>,
    port: u16,
    data_parallel_index: u16,
    push: bool,
    advertise_local: bool,
    key_file: Option<PathBuf>,
}

impl ListenerOptions {
    pub(super) fn bind_port(&self) -> Result<u16> {
        net::bind_port(self.port, self.data_parallel_index)
    }
}

fn start(config: &ListenerOptions) -> Result<ListenerObject> {
    let shape = EngineShape { tp: config.tp_size, pp: config.pp_size, dcp: config.dcp_size };
    let drawn = getrandom::u64()
        .map_err(|e| Error::new(ErrorKind::Io, format!("drawing a random incarnation from the system: {e}")))?;
    let pushes = if config.push { Pushes::Accepted } else { Pushes::Refused };
    let directory = Directory::new(config.engine_id.clone(), Incarnation(drawn.max(1)), shape, pushes)?;
    let directory = Arc::new(Mutex::new(directory));
    let key = Key::configured(config.key_file.as_deref())?;
    let address = net::choose(config.host.as_deref(), config.bind.as_deref(), config.advertise_local)?;
    let shared = Arc::clone(&directory);
    let mut auth = AuthLayer::new(key, &address);
    let settings = ListenerConfig { address, port: config.bind_port()?, pushes: config.push };
    let listener = net::Listener::bind(&settings, move |request| {
        auth.answer(request, |clear| shared.lock().unwrap_or_else(PoisonError::into_inner).answer(clear))
    })?;
    Ok(ListenerObject { listener: Mutex::new(listener), directory })
}

/// Starts a listener that serves the metadata of one engine's ranks to other engines. It is bound when this returns; a
/// port that is taken is KVF_ADDRESS_IN_USE.
///
/// `config` is a msgpack map with engine_id and the keys for a listener that kvf_settings_describe tells and
/// docs/configuration.md lists.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_listener_start(config: *const u8, config_len: usize, out: *mut *mut kvf_listener) -> i32 {
    boundary!(kvf_listener_start, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (out, config) = unsafe { (Out::new(out, "out")?, slice(config, config_len, "config")?) };
        let config: ListenerOptions = parse_config(Component::Listener, config)?;
        log::start();
        out.write(handle::give(start(&config)?));
        Ok(())
    })
}

/// Adds one rank's metadata (of kvf_worker_metadata); `*missing` becomes the number of ranks still missing. Queries are
/// answered with "not ready" until there are none.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_listener_offer(
    listener: *mut kvf_listener,
    metadata: *const u8,
    metadata_len: usize,
    missing: *mut u32,
) -> i32 {
    boundary!(kvf_listener_offer, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (missing, metadata) =
            unsafe { (Out::new(missing, "missing")?, slice(metadata, metadata_len, "metadata")?) };
        let host = handle::get::<ListenerObject>(listener)?;
        let mut directory = host.directory.lock().unwrap_or_else(PoisonError::into_inner);
        directory.offer(metadata.to_vec())?;
        missing.write(directory.missing());
        Ok(())
    })
}

/// The host and port to tell other engines.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_listener_address(
    listener: *mut kvf_listener,
    host: *mut kvf_buffer,
    port: *mut u16,
) -> i32 {
    boundary!(kvf_listener_address, {
        // SAFETY: the caller's promise for out-parameters.
        let (host, port) = unsafe { (Out::new(host, "host")?, Out::new(port, "port")?) };
        let object = handle::get::<ListenerObject>(listener)?;
        let listener = object.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = listener.failure() {
            return Err(error);
        }
        buffer::give(host, listener.host().as_bytes().to_vec());
        port.write(listener.port());
        Ok(())
    })
}

/// Stops the listener, frees its port and the handle.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_listener_free(listener: *mut kvf_listener) -> i32 {
    boundary!(kvf_listener_free, {
        let host = handle::take::<ListenerObject>(listener)?;
        host.listener.lock().unwrap_or_else(PoisonError::into_inner).shutdown();
        Ok(())
    })
}
