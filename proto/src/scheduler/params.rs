//! `kv_transfer_params` from outside: what is missing and what is malformed.

use super::SchedulerMachineConfig;
use crate::error::{Error, Result};
use crate::geometry::{Group, GroupKind, MAX_GROUPS};
use crate::ids::{EngineId, Incarnation, RequestId};
use crate::wire::limits::MAX_BLOCK_IDS;
use crate::wire::{Blocks, Remote, TransferParams};

/// The lease assumed when the params name none: vLLM's own default for a hand-over.
const DEFAULT_LEASE_MS: u64 = 30_000;

/// The longest host name of the DNS (RFC 1035), which also holds any numeric address.
const MAX_HOST_BYTES: usize = 255;

/// How much of a text from outside an error shows.
const SHOWN_CHARS: usize = 64;

/// The beginning of a text from outside, which may be of any length.
fn shown(text: &str) -> String {
    let short: String = text.chars().take(SHOWN_CHARS).collect();
    if short.len() == text.len() { format!("{text:?}") } else { format!("{short:?}... ({} bytes)", text.len()) }
}

fn bad(request: &RequestId, text: impl std::fmt::Display) -> Error {
    Error::invalid(format!("kv_transfer_params of request {request}: {text}"))
}

/// Refuses params that ask for both roles at once.
pub(super) fn check_roles(request: &RequestId, params: &TransferParams) -> Result<()> {
    if params.do_remote_prefill && params.do_remote_decode {
        return Err(bad(
            request,
            "do_remote_prefill and do_remote_decode are both true; a prefill engine is sent do_remote_decode, a decode \
             engine do_remote_prefill",
        ));
    }
    Ok(())
}

/// True if the prefill engine was asked at the same time, so that the rest is to be asked of it.
pub(super) fn awaits(params: &TransferParams) -> bool {
    params.transfer_id.is_some() && params.remote_request_id.is_none() && params.remote_block_ids.is_none()
}

/// True if a prefill engine is told where the history of a conversation is: in a decode engine, whose answer to the turn
/// before the proxy passes on.
pub(super) fn names_history(params: &TransferParams) -> bool {
    params.do_remote_decode && params.remote_block_ids.is_some()
}

/// The name under which consumers know a request that is prefilled here, if they were given one.
pub(super) fn name(request: &RequestId, params: &TransferParams) -> Result<Option<RequestId>> {
    let name = params.transfer_id.as_ref().map(RequestId::new).transpose();
    name.map_err(|e| bad(request, format_args!("transfer_id: {e}")))
}

/// Where the request was, or is being, prefilled. Names every missing key at once. Refuses a host that this engine may not
/// read from.
pub(super) fn remote(request: &RequestId, params: &TransferParams, config: &SchedulerMachineConfig) -> Result<Remote> {
    check_roles(request, params)?;
    let awaits = awaits(params);
    let named = if awaits { params.transfer_id.as_ref() } else { params.remote_request_id.as_ref() };
    let missing: Vec<&str> = [
        ("remote_engine_id", params.remote_engine_id.is_none()),
        ("remote_request_id", named.is_none()),
        ("remote_host", params.remote_host.is_none()),
        ("remote_port", params.remote_port.is_none()),
        ("remote_block_ids", params.remote_block_ids.is_none() && !awaits),
    ]
    .into_iter()
    .filter_map(|(key, missing)| missing.then_some(key))
    .collect();
    let (Some(engine), Some(remote_request), Some(host), Some(port), true) =
        (params.remote_engine_id.as_ref(), named, params.remote_host.as_ref(), params.remote_port, missing.is_empty())
    else {
        let remedy = if awaits {
            "a proxy that asks both engines at once takes them from an earlier answer of the prefill engine"
        } else {
            "the proxy must pass on the kv_transfer_params of the prefill engine's answer unchanged, or name the request to \
             both engines at once by transfer_id"
        };
        return Err(bad(
            request,
            format_args!(
                "do_remote_prefill needs {}, which {} missing; {remedy}",
                missing.join(", "),
                if missing.len() == 1 { "is" } else { "are" }
            ),
        ));
    };
    if host.is_empty() || host.len() > MAX_HOST_BYTES {
        return Err(bad(
            request,
            format_args!("remote_host: expected 1 to {MAX_HOST_BYTES} bytes, got {}", host.len()),
        ));
    }
    if config.allowed_hosts.as_ref().is_some_and(|allowed| !allowed.allows(host)) {
        return Err(bad(
            request,
            format_args!(
                "remote_host {} is not among this engine's allowed_hosts; add it there if it is one of your engines, and have \
                 the proxy remove kv_transfer_params that clients send",
                shown(host)
            ),
        ));
    }
    let port = match u16::try_from(port) {
        Ok(port) if port > 0 => port,
        _ => return Err(bad(request, format_args!("remote_port: expected 1 to 65535, got {port}"))),
    };
    let lease_ms = match params.remote_lease_ms {
        None => DEFAULT_LEASE_MS,
        Some(ms) => match u64::try_from(ms) {
            Ok(ms @ 1..=864_000_000) => ms,
            _ => {
                return Err(bad(
                    request,
                    format_args!("remote_lease_ms: expected 1 to 864000000 milliseconds, got {ms}"),
                ));
            }
        },
    };
    let lease_id = match params.remote_lease_id {
        None => 0,
        Some(id) => match u64::try_from(id) {
            Ok(id) if id > 0 => id,
            _ => return Err(bad(request, format_args!("remote_lease_id: expected 1 or more, got {id}"))),
        },
    };
    if let Some(mode) = &params.transfer_mode
        && mode != "pull"
    {
        return Err(bad(
            request,
            format_args!("transfer_mode: expected \"pull\", got {}; run kvferry on both engines", shown(mode)),
        ));
    }
    let incarnation = match &params.remote_incarnation {
        None => None,
        Some(text) => match u64::from_str_radix(text, 16) {
            Ok(number) if number != 0 && text.len() == 16 && !text.starts_with('+') => Some(Incarnation(number)),
            _ => {
                return Err(bad(
                    request,
                    format_args!("remote_incarnation: expected 16 hexadecimal digits, not all 0, got {}", shown(text)),
                ));
            }
        },
    };
    Ok(Remote {
        engine: EngineId::new(engine).map_err(|e| bad(request, format_args!("remote_engine_id: {e}")))?,
        incarnation,
        request: RequestId::new(remote_request).map_err(|e| {
            let key = if awaits { "transfer_id" } else { "remote_request_id" };
            bad(request, format_args!("{key}: {e}"))
        })?,
        host: host.clone(),
        port,
        lease_ms,
        lease_id,
        shared: params.shared == Some(true),
    })
}

/// The producer's block ids per KV-cache group of its own, which hold `tokens` tokens. Its block sizes, and whether the ids
/// fit its cache, are known after the handshake; here a block has at least one token.
pub(super) fn remote_blocks(request: &RequestId, params: &TransferParams, tokens: u64) -> Result<Vec<Vec<u32>>> {
    let lists = params.remote_block_ids.as_deref().unwrap_or_default();
    if lists.is_empty() || lists.len() > MAX_GROUPS {
        return Err(bad(
            request,
            format_args!(
                "remote_block_ids: expected one list for each of the producer's KV-cache groups (1 to {MAX_GROUPS}), got \
                 {}; pass on the kv_transfer_params of the prefill engine's answer unchanged",
                lists.len()
            ),
        ));
    }
    let ids = lists.iter().map(Vec::len).fold(0, usize::saturating_add);
    if ids > MAX_BLOCK_IDS {
        return Err(bad(
            request,
            format_args!("remote_block_ids: {ids} block ids, at most {MAX_BLOCK_IDS} can be for all groups together"),
        ));
    }
    let mut groups = Vec::with_capacity(lists.len());
    for (g, list) in lists.iter().enumerate() {
        // A state has a block, whatever the tokens.
        if list.len() as u64 > tokens.max(1) {
            return Err(bad(
                request,
                format_args!(
                    "remote_block_ids[{g}]: {} block ids for {tokens} tokens; pass on the kv_transfer_params of the prefill \
                     engine's answer unchanged",
                    list.len()
                ),
            ));
        }
        let mut ids = Vec::with_capacity(list.len());
        for (i, &id) in list.iter().enumerate() {
            ids.push(u32::try_from(id).map_err(|_| {
                bad(
                    request,
                    format_args!("remote_block_ids[{g}][{i}]: expected a block id from 0 to {}, got {id}", u32::MAX),
                )
            })?);
        }
        groups.push(ids);
    }
    Ok(groups)
}

/// The blocks of `ids`, which end with the last of `tokens` tokens, that a consumer can need: in the window or chunk, with
/// one more in front of it for a consumer that asks for a token less, or the last one of a state.
pub(super) fn needed<'a>(group: &Group, ids: &'a [u32], tokens: u64) -> &'a [u32] {
    let most = match (group.kind, group.kind.front(tokens)) {
        (GroupKind::State, _) => 1,
        (_, Some(front)) => tokens.div_ceil(group.span()).saturating_sub(front / group.span()).saturating_add(1),
        (_, None) => return ids,
    };
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    ids.get(ids.len().saturating_sub(most)..).unwrap_or(ids)
}

/// The tokens that the producer holds: at least those that are handed over, and no more where a state goes with them.
pub(super) fn held_tokens(
    request: &RequestId,
    params: &TransferParams,
    config: &SchedulerMachineConfig,
    prompt_tokens: u64,
) -> Result<u64> {
    let needed = config.handed_over(prompt_tokens);
    let n = match params.remote_num_tokens {
        Some(n) => n,
        None if params.do_remote_decode => {
            return Err(bad(
                request,
                "remote_num_tokens is missing: a history's blocks may hold more than this prompt; the proxy must pass on the \
                 kv_transfer_params of the decode engine's answer unchanged",
            ));
        }
        None => return Ok(needed),
    };
    let held =
        u64::try_from(n).map_err(|_| bad(request, format_args!("remote_num_tokens: expected 0 or more, got {n}")))?;
    if needed < prompt_tokens && held != needed {
        return Err(bad(
            request,
            format_args!(
                "remote_num_tokens: the producer's state is that after {held} tokens, {needed} are needed for a prompt \
                 of {prompt_tokens}; send the prefill engine the prompt without its last token"
            ),
        ));
    }
    if held < needed {
        return Err(bad(
            request,
            format_args!(
                "remote_num_tokens: the producer holds {held} tokens, the prompt has {prompt_tokens}; send both \
                 engines the same prompt"
            ),
        ));
    }
    Ok(held)
}

/// True if `offered`, what is left of each group's blocks, is all that a consumer needs to go on behind `tokens` tokens. A
/// state is not: it may have gone on already.
pub(super) fn continues(config: &SchedulerMachineConfig, offered: &[Vec<u32>], tokens: u64) -> bool {
    config.groups.iter().zip(offered).all(|(group, ids)| {
        let front = group.kind.front(tokens.saturating_add(1)).unwrap_or(0);
        let needed = tokens.div_ceil(group.span()).saturating_sub(front / group.span());
        group.kind != GroupKind::State
            && ids.len() as u64 >= needed
            && !ids.iter().any(|&id| config.null_block == Some(id))
    })
}

/// Checks the blocks to be filled with the tokens `start..end`. The error is for people.
pub(super) fn check_local(
    config: &SchedulerMachineConfig,
    local: &[Blocks],
    start: u64,
    end: u64,
) -> Result<(), String> {
    for (g, (group, list)) in config.groups.iter().zip(local).enumerate() {
        let span = group.span();
        let expected = end.div_ceil(span).saturating_sub(start / span);
        let found = list.len() as u64;
        let wrong = match group.kind {
            GroupKind::Full | GroupKind::Latent => found != expected,
            GroupKind::SlidingWindow { .. } | GroupKind::Chunked { .. } => found > end.div_ceil(span),
            GroupKind::State => false,
        };
        if wrong {
            return Err(format!(
                "KV-cache group {g}: tokens {start} to {end} are to be loaded, which {expected} blocks of {span} tokens \
                 hold, but {found} blocks are to be filled"
            ));
        }
    }
    Ok(())
}
