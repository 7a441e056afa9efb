//! `kv_transfer_params`: what a producer's scheduler returns with a finished prefill and a proxy hands to the decoder.

use serde::{Deserialize, Deserializer, Serialize};

/// The params in the spelling that vLLM's proxies pass through. Everything is optional here, because it comes from
/// outside; `proto::scheduler` says which key is missing when it needs it. A key that is null counts as missing: proxies
/// send every key that they know.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TransferParams {
    /// True in what a decoder is given: load the prompt's cache from the producer.
    #[serde(default, deserialize_with = "false_if_null")]
    pub do_remote_prefill: bool,
    /// True in what a prefill engine is given: keep the blocks for a decoder.
    #[serde(default, deserialize_with = "false_if_null")]
    pub do_remote_decode: bool,
    /// The name that a proxy gives a request when it asks both engines at once. Then it does not wait for the prefill
    /// engine's answer; the name is the same for both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer_id: Option<String>,
    /// Producer engine id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_engine_id: Option<String>,
    /// Producer engine's incarnation, as 16 hexadecimal digits (JSON numbers do not hold 64 bits).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_incarnation: Option<String>,
    /// The request as the producer names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_request_id: Option<String>,
    /// Host of the producer's handshake listener.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_host: Option<String>,
    /// Port of the producer's handshake listener.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_port: Option<i64>,
    /// Block ids per KV-cache group, out-of-window blocks clipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_block_ids: Option<Vec<Vec<i64>>>,
    /// Tokens whose cache the blocks hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_num_tokens: Option<i64>,
    /// The lease granted, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_lease_ms: Option<i64>,
    /// Which of the producer's grants it is, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_lease_id: Option<i64>,
    /// Producer's tensor-parallel size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tp_size: Option<i64>,
    /// Producer's pipeline-parallel size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pp_size: Option<i64>,
    /// Producer's decode-context-parallel size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dcp_size: Option<i64>,
    /// True where other requests of the decode engine may come with the same params. The samples of one prompt do.
    /// The decode engine's own host says so; it does not travel between engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// `pull`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer_mode: Option<String>,
}

fn false_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(false))
}
