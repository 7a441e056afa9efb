//! Two engines seen before a request runs: `kvferry plan` describes a deployment, `kvferry doctor` a running engine.

#![forbid(unsafe_code)]

mod describe;
mod survey;

pub use describe::{
    Deployment, DescribedLink, DescribedRank, Description, MAX_DESCRIBED_PARTS, MAX_DESCRIBED_RANKS,
    MAX_DESCRIBED_TOKENS,
};
pub use survey::{OwnSide, Survey, SurveyedField, SurveyedRank, decode_ranks};
