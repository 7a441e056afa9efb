//! From the agent's settings to UCX's.

use std::sync::Arc;

use super::config::{AgentConfig, Transport};
use crate::error::{Error, Result};
use crate::mem::{cuda, ucx_error};
use crate::ucx::{Context, ContextConfig, Library};

/// Opens UCX and makes the context that the settings ask for.
pub(super) fn context(config: &AgentConfig) -> Result<Arc<Context>> {
    let library = Library::open(config.ucx_lib.as_deref()).map_err(ucx_error)?;
    let tls = tls(config)?;
    let settings = config.ucx.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    let context = Context::new(&ContextConfig { tls: tls.clone(), net_devices: None, settings, name: config.name.clone() })
        .map_err(ucx_error)?;
    log::info!(
        "agent {}: {}; transports: {}; memory: {}",
        config.name,
        library.info(),
        tls.as_deref().unwrap_or("as UCX chooses"),
        context.memory_types()
    );
    for other in Library::others() {
        log::warn!(
            "agent {}: {} is loaded in this process beside the UCX in use; two UCX in one process can hang",
            config.name,
            other.display()
        );
    }
    Ok(context)
}

/// The value for `UCX_TLS`; `None` leaves it to the settings, the environment and UCX.
fn tls(config: &AgentConfig) -> Result<Option<String>> {
    let base = match config.transport {
        Transport::Auto => return Ok(None),
        Transport::Tcp => "tcp",
        // CMA moves the bytes; the messages and the connection's set-up need a transport that notices a dead peer,
        // which UCX's shared-memory ones do not: those go over TCP.
        Transport::Shm => "sm,tcp,self",
    };
    if let Some(name) = config.ucx.keys().find(|name| matches!(name.as_str(), "TLS" | "UCX_TLS")) {
        return Err(Error::invalid(format!(
            "both a transport ({base}) and the UCX setting {name} were given; give one of them, or the transport auto"
        )));
    }
    // Without a device UCX would warn about a transport that it does not have.
    Ok(Some(if cuda::available() { format!("{base},cuda_copy,cuda_ipc") } else { base.to_owned() }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
