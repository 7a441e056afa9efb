//! From the agent's settings to UCX's.

use std::sync::Arc;

use super::ucx_devices::{self, NetDevice, network_devices};
use crate::agent::core::config::{AgentConfig, Transport};
use crate::agent::core::limits::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::mem::{cuda, ucx_error};
use crate::net::local_addresses;
use crate::ucx::{Context, ContextConfig, Library, MAX_PARTS, UcxError, configured};

/// UCX's setting of the network devices to use.
const NET_DEVICES: &str = "NET_DEVICES";
/// UCX's setting of the ports at which its TCP listens.
const PORT_RANGE: &str = "TCP_PORT_RANGE";

/// Room in a segment for what a message has beside a chunk's bytes: headers, the list of pieces of a write, a seal.
const SEGMENT_EXTRA: u64 = 64 << 10;

/// The first UCX that can be told not to emulate one-sided operations. Older ones warn of the setting at each worker.
pub(super) const CAN_REFUSE: (u32, u32, u32) = (1, 21, 0);

/// The length of UCX's TCP segments by default, in bytes.
const SHORT_SEGMENT: &str = "8192";

/// What UCX may use unless somebody chose otherwise: all but the transports over shared memory, which no endpoint of an agent
/// can take, because they do not notice a dead peer. Every worker would take some MiB of /dev/shm for them.
const DEFAULT_TLS: &str = "^posix,sysv,xpmem";

/// A context, and what was decided for it.
pub(crate) struct Opened {
    pub(crate) context: Arc<Context>,
    /// The network devices of this host, those that UCX does not get included.
    pub(crate) devices: Vec<NetDevice>,
    /// The context's settings.
    pub(crate) asked: ContextConfig,
}

/// Has UCX's TCP devices listen at `port`, each at its own address; at any port each if `None`.
pub(super) fn set_port(asked: &mut ContextConfig, port: Option<u16>) {
    asked.if_known.retain(|(name, _)| name != PORT_RANGE);
    asked.if_known.push((PORT_RANGE.to_owned(), port.unwrap_or(0).to_string()));
}

/// Opens UCX and makes the context that the settings ask for, whose workers listen at `port`; where UCX likes if `None`.
///
/// With a key and TCP only, where transfers are served by the agents' own messages, UCX gets no part in reading or writing
/// memory: its emulation would serve whoever speaks its protocol.
pub(crate) fn open(config: &AgentConfig, is_keyed: bool, port: Option<u16>) -> Result<Opened> {
    let library = Library::open(config.ucx_lib.as_deref()).map_err(ucx_error)?;
    let settings: Vec<(String, String)> =
        config.ucx.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    // Where only a configuration file of UCX's says it. "all" is UCX's default.
    let chosen = |name: &str| match config.ucx_setting(name) {
        Some(value) => Ok(Some(value)),
        None => configured(library, name).map(|value| value.filter(|value| value != "all")).map_err(ucx_error),
    };
    let tls = match tls(config)? {
        None if chosen("TLS")?.is_none() => Some(DEFAULT_TLS.to_owned()),
        tls => tls,
    };
    let mut asked = ContextConfig {
        tls: tls.clone(),
        settings,
        if_known: settings_if_known(config, library.info().number),
        messages_only: is_keyed && config.transport == Transport::Tcp,
        name: config.name.clone(),
    };
    set_port(&mut asked, port);
    let opened = with_devices(config, &asked, library.info().number, chosen("NET_DEVICES")?.as_deref())?;
    log::info!(
        "agent {}: {}; transports: {}; memory: {}",
        config.name,
        library.info(),
        tls.as_deref().unwrap_or("as UCX chooses"),
        opened.context.memory_types()
    );
    for other in Library::others() {
        log::warn!(
            "agent {}: {} is loaded in this process beside the UCX in use; two UCX in one process can hang",
            config.name,
            other.display()
        );
    }
    Ok(opened)
}

/// Makes the context with the network devices that it should have; `named` is who else says which.
///
/// UCX lists its devices only in a context, so where some are to be left out a second one is made.
fn with_devices(
    config: &AgentConfig,
    asked: &ContextConfig,
    ucx: (u32, u32, u32),
    named: Option<&str>,
) -> Result<Opened> {
    let local = local_addresses().unwrap_or_else(|error| {
        log::info!("agent {}: {error}; UCX has all network devices", config.name);
        Vec::new()
    });
    let mut asked = asked.clone();
    let resources = |context: &std::result::Result<Arc<Context>, UcxError>| {
        context.as_ref().map(|context| context.resources()).unwrap_or_default()
    };
    let mut context = Context::new(&asked);
    let mut found = resources(&context);
    if config.ucx_setting("TCP_BRIDGE_ENABLE").is_none()
        && ucx_devices::needs_bridges(&found, &local, named, ucx_devices::is_bridge)
    {
        drop(context);
        asked.if_known.push(("TCP_BRIDGE_ENABLE".to_owned(), "y".to_owned()));
        context = Context::new(&asked);
        found = resources(&context);
    }
    let all = found.clone();
    match named {
        Some(named) if network_devices(&found).is_empty() => {
            let mut unnamed = asked.clone();
            unnamed.if_known.push((NET_DEVICES.to_owned(), "all".to_owned()));
            ucx_devices::names_nothing(named, &resources(&Context::new(&unnamed)))?;
        }
        Some(_) => {}
        None => {
            let out = ucx_devices::left_out(&all, &local);
            if let Some(list) = ucx_devices::setting(ucx, &all, &out).filter(|_| !out.is_empty()) {
                drop(context);
                asked.if_known.push((NET_DEVICES.to_owned(), list));
                context = Context::new(&asked);
                found = resources(&context);
            }
        }
    }
    let context = context.map_err(ucx_error)?;
    let devices = ucx_devices::describe(&found, &all, &local, named);
    for device in devices.iter().filter(|device| named.is_none() && !device.is_used) {
        log::info!(
            "agent {}: UCX does not use the network device {}: {}; UCX_NET_DEVICES chooses otherwise",
            config.name,
            device.name,
            device.why
        );
    }
    Ok(Opened { context, devices, asked })
}

/// UCX's settings by name and value that every agent has where its UCX knows them: what nobody has set otherwise, and what
/// nobody may.
fn settings_if_known(config: &AgentConfig, ucx: (u32, u32, u32)) -> Vec<(String, String)> {
    // With UCX's segments of 8 KiB, a message of a chunk goes over TCP in pieces that are put together again, at a third of
    // the speed. So a segment holds a whole one.
    let segment = (CHUNK_BYTES + SEGMENT_EXTRA).to_string();
    // UCX's older protocols do not look at how long the receiver's segments are, so theirs must fit everywhere.
    let has_older_protocols = config.ucx_setting("PROTO_ENABLE").is_some_and(|value| is_no(&value));
    // With UCX's default of 6, a message of more parts is not sent from where they are. Two are UCX's headers.
    let parts = (MAX_PARTS + 2).to_string();
    //
    // A worker's lock is also taken by UCX's own thread, when a connection comes in. As a spin lock, its default, it keeps a
    // processor busy until whoever holds it gets one: with 64 agents on two processors, 12 of the 55 ms of processor time
    // that first contact took.
    let mut defaults = vec![("TCP_MAX_IOV", &*parts), ("USE_MT_MUTEX", "y")];
    if !has_older_protocols {
        defaults.push(("TCP_TX_SEG_SIZE", &segment));
    }
    // Without rendezvous nothing uses the second TCP connection that UCX would open to every peer for its puts.
    if config.transport != Transport::Auto {
        defaults.push(("RNDV_SCHEME", "get_zcopy"));
    }
    // TCP, which carries all messages of these transports, asks for a silent peer by itself (after 10 s, as UCX sets its
    // sockets). A lane for UCX's own asking costs every connection a look at the properties of each network device, on both
    // sides: some 60 system calls, a sixth of the time to meet an engine of 64 ranks.
    //
    // An RDMA device says nothing of a peer that died, so UCX asks, and unreliable datagrams (UD), which carry the messages,
    // give up after a time of their own. With UCX's 20 s and 30 s a killed peer was noticed after 63 to 69 s over soft RoCE,
    // twice as long as a lease; with these after 4 to 8 s. Linux' soft RoCE takes 7 retries, UCX's default, for endless: a
    // read of a dead peer's memory ended a minute after its connection, or never. Each takes 1.1 s, and the peer notices up
    // to 3 s later where only the second of two devices is lost: 4 keep both within a third of a lease.
    if config.transport == Transport::Auto {
        defaults.extend([("KEEPALIVE_INTERVAL", "2s"), ("UD_VERBS_TIMEOUT", "3s"), ("UD_MLX5_TIMEOUT", "3s")]);
        defaults.push(("RC_VERBS_RETRY_COUNT", "4"));
        // UCX's default of one leaves all devices but one idle. As NIXL has it.
        defaults.push(("MAX_RMA_RAILS", "2"));
    } else {
        defaults.push(("KEEPALIVE_INTERVAL", "inf"));
    }
    // What peers and owners of memory rely on. A segment that is longer than the receiver's is written over the receiver's
    // memory; addresses of version 2 say how long those are, which version 1, UCX's default, does not. A message by
    // rendezvous is refused.
    //
    // An endpoint that watches its peer, as ours do, may with rendezvous use only transports that can revoke a peer's access
    // to memory. CMA cannot, so UCX would have no lane for it.
    //
    // UCX's TCP connects with a blocking connect(2) by default, which a firewall that drops what it should refuse lets last
    // two minutes: as long as that nothing else happens on the thread.
    //
    // UCX's TCP writes into memory for any peer whose UCX finds that ability in the address, whatever features the
    // context has and whichever rkey the peer was given.
    //
    // What UCX has unmapped stays registered in its cache, and an RDMA device goes on serving whoever has the rkey. Without
    // the cache, unmapping ends remote access before it returns.
    //
    // Where no lane moves memory without the peer's processor, UCX would have it move the bytes by messages of its own. One
    // that serves such a read is aborted by UCX when the reader dies. Refused, the bytes go by the agents' messages.
    let mut relied_on = vec![
        ("RCACHE_ENABLE", "n"),
        ("RNDV_THRESH", "inf"),
        ("ADDRESS_VERSION", "v2"),
        ("TCP_RX_SEG_SIZE", &*segment),
        ("TCP_PUT_ENABLE", "n"),
        ("TCP_CONN_NB", "y"),
    ];
    if ucx >= CAN_REFUSE {
        relied_on.push(("PROTO_EMULATION_ENABLE", "n"));
    }
    // Off by default: a second way to have the peer's processor take part, for device memory.
    if ucx >= (1, 22, 0) {
        relied_on.push(("RMA_PPLN_ENABLE", "n"));
    }
    if has_older_protocols {
        relied_on.push(("TCP_TX_SEG_SIZE", SHORT_SEGMENT));
    }
    for (name, value) in &relied_on {
        if let Some(other) = config.ucx_setting(name).filter(|other| other != value) {
            log::warn!("agent {}: UCX_{name}={other} is set, and not used: kvferry relies on {value}", config.name);
        }
    }
    let free = defaults.into_iter().filter(|(setting, _)| config.ucx_setting(setting).is_none());
    free.chain(relied_on).map(|(setting, value)| (setting.to_owned(), value.to_owned())).collect()
}

/// Whether UCX takes a setting's value for no.
fn is_no(value: &str) -> bool {
    ["n", "no", "off", "0"].iter().any(|no| value.eq_ignore_ascii_case(no))
}

/// The value for `UCX_TLS`; `None` leaves it to the settings, the environment and UCX.
fn tls(config: &AgentConfig) -> Result<Option<String>> {
    let (base, device) = match config.transport {
        Transport::Auto => return Ok(None),
        Transport::Tcp => ("tcp", ",cuda_copy"),
        // CMA moves the bytes between two processes, `self` those within one worker. Messages need a transport that
        // notices a dead peer, which UCX's shared-memory ones do not by default: they go over TCP.
        Transport::Shm => ("cma,tcp,self", ",cuda_copy,cuda_ipc"),
    };
    if let Some(name) = config.ucx.keys().find(|name| matches!(name.as_str(), "TLS" | "UCX_TLS")) {
        return Err(Error::invalid(format!(
            "both a transport ({base}) and the UCX setting {name} were given; give one of them, or the transport auto"
        )));
    }
    // Without a device UCX would warn about transports that it does not have.
    Ok(Some(format!("{base}{}", if cuda::available() { device } else { "" })))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ucx_connects_without_blocking() {
        let ucx = [("TCP_CONN_NB".to_owned(), "n".to_owned())].into();
        let config = AgentConfig { ucx, ..AgentConfig::default() };
        let settings = settings_if_known(&config, CAN_REFUSE);
        assert!(settings.contains(&("TCP_CONN_NB".to_owned(), "y".to_owned())), "{settings:?}");
    }

    #[test]
    fn segments_are_long_on_both_sides() {
        let of = |config: &AgentConfig, name: &str| {
            let settings = settings_if_known(config, CAN_REFUSE);
            let mut values = settings.into_iter().filter_map(|(known, value)| (known == name).then_some(value));
            (values.next(), values.next())
        };
        let long = (CHUNK_BYTES + SEGMENT_EXTRA).to_string();
        let mut config = AgentConfig::default();
        for name in ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"] {
            assert_eq!(of(&config, name), (Some(long.clone()), None));
        }
        config.ucx = [("TCP_TX_SEG_SIZE".to_owned(), "64k".to_owned())].into();
        assert_eq!(of(&config, "TCP_TX_SEG_SIZE"), (None, None), "the caller's");
        config.ucx.insert("PROTO_ENABLE".to_owned(), "n".to_owned());
        assert_eq!(of(&config, "TCP_TX_SEG_SIZE"), (Some(SHORT_SEGMENT.to_owned()), None));
        assert_eq!(of(&config, "TCP_RX_SEG_SIZE"), (Some(long), None));
    }

    #[test]
    fn nobody_can_have_unmapped_memory_stay_registered() {
        let mut config = AgentConfig::default();
        for value in ["y", "try"] {
            config.ucx.insert("RCACHE_ENABLE".to_owned(), value.to_owned());
            let set: Vec<_> = settings_if_known(&config, CAN_REFUSE)
                .into_iter()
                .filter(|(name, _)| name == "RCACHE_ENABLE")
                .collect();
            assert_eq!(set, [("RCACHE_ENABLE".to_owned(), "n".to_owned())]);
        }
    }

    #[test]
    fn a_transport_and_a_contradicting_setting_are_refused() {
        let mut config = AgentConfig { transport: Transport::Tcp, ..AgentConfig::default() };
        assert!(tls(&config).unwrap().unwrap().starts_with("tcp"));
        config.ucx.insert("UCX_TLS".to_owned(), "ib".to_owned());
        assert!(tls(&config).unwrap_err().message().contains("UCX_TLS"));
        config.transport = Transport::Auto;
        assert_eq!(tls(&config).unwrap(), None);
    }
}
