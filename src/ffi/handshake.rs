//! `kvf_handshake_*`: a handshake without an engine.

use std::ffi::c_char;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::boundary::{slice, text};
use super::buffer::{fill, kvf_buffer};
use super::{decode, log};
use crate::agent::encode_metadata;
use crate::error::{Error, ErrorKind, Result};
use crate::net;
use crate::planner::{OwnSide, Survey, decode_ranks};
use crate::proto::ids::EngineId;
use crate::proto::wire::{HandshakeReply, RefusalCode};
use crate::secret::Key;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SurveyOptions {
    engine: Option<EngineId>,
    own: Option<OwnSide>,
    key_file: Option<PathBuf>,
    timeout_ms: Option<u32>,
}

#[derive(Serialize)]
struct SurveyReply {
    survey: Survey,
    agents: Vec<ByteBuf>,
}

/// Asks a handshake listener for the metadata of all ranks of its engine. It is at `host`:`port`; the ranks are
/// compared with an engine that need not run. Waits up to the configured time, also for a listener that is not
/// complete yet, but not for one that is not up.
///
/// `config` is a msgpack map, or NULL with length 0 for the defaults. Keys: engine (str: the engine expected there; any),
/// key_file (as in kvf_listener_start), timeout_ms (10000), own (the side that asks: map with model and engine, as model
/// and producer in kvf_plan_describe, and compat, a map of those compatibility fields that are known).
///
/// `*out` is a msgpack map. survey: map with protocol (the newest version that both speak), engine, incarnation (hexadecimal digits), shape (tp,
/// pp, dcp), ranks (list of maps with rank, name, ucx_version, regions, bytes, memory, layers, heads and blocks) and fields
/// (list of maps with name, here (str or nil), there, must_match, fits (bool, or nil where nothing is compared) and
/// remedy). agents: the ranks' agent metadata in the same order, for kvf_agent_connect.
///
/// KVF_UNREACHABLE and KVF_TIMEOUT without an answer, KVF_INCOMPATIBLE where only one side has a key or another one or where
/// another engine answers, KVF_VERSION_MISMATCH and KVF_CORRUPT for an answer that cannot be understood.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_handshake_survey(
    host: *const c_char,
    host_len: usize,
    port: u16,
    config: *const u8,
    config_len: usize,
    out: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_handshake_survey, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let (host, config) = (text(host, host_len, "host")?, slice(config, config_len, "config")?);
            let config =
                if config.is_empty() { SurveyOptions::default() } else { decode::map("the configuration", config)? };
            log::start();
            fill(out, || survey(host, port, config))
        }
    })
}

fn survey(host: &str, port: u16, config: SurveyOptions) -> Result<Vec<u8>> {
    let key = Key::configured(config.key_file.as_deref())?;
    let timeout = Duration::from_millis(config.timeout_ms.unwrap_or(10_000).into());
    let reply = net::query(key.as_ref(), host, port, config.engine, Vec::new(), timeout)?;
    let answered = |e: Error| e.context(format_args!("the listener at {}", net::host_port(host, port)));
    match reply {
        HandshakeReply::Ranks { engine, incarnation, shape, ranks, .. } => {
            let (ranks, protocol) = decode_ranks(&engine, shape, &ranks).map_err(answered)?;
            let survey = Survey::of(incarnation, &ranks, protocol, config.own.as_ref())?;
            let agents = ranks.iter().map(|rank| encode_metadata(&rank.agent).map(ByteBuf::from));
            decode::encode("a survey", &SurveyReply { survey, agents: agents.collect::<Result<_>>()? })
        }
        HandshakeReply::Refused { code, message, .. } => Err(answered(Error::new(kind_of(code), message))),
        HandshakeReply::Pushed { .. } | HandshakeReply::Prefills { .. } => {
            Err(answered(Error::corrupt("it answered a query as if it were something else")))
        }
    }
}

fn kind_of(code: RefusalCode) -> ErrorKind {
    match code {
        RefusalCode::NotReady => ErrorKind::Timeout,
        RefusalCode::Version => ErrorKind::VersionMismatch,
        RefusalCode::TooLarge => ErrorKind::Exhausted,
        RefusalCode::Key | RefusalCode::WrongEngine => ErrorKind::Incompatible,
        RefusalCode::UnknownRank | RefusalCode::Malformed | RefusalCode::Push | RefusalCode::Other => {
            ErrorKind::InvalidArgument
        }
    }
}
