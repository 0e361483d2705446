//! The model's folder, where the daemon can read it: what was loaded, and how its text becomes tokens.
//!
//! It is the folder that the server loads, in Hugging Face's form: `config.json`, `*.safetensors`, `tokenizer.json`,
//! `tokenizer_config.json`, and the chat template in the latter or beside it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use baton_protocol::identity::{Attention, Fact, Rope};
use bytes::Bytes;
use serde_json::Value;

use crate::model::artifacts::chat_template_json;

/// A folder that cannot be used, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FolderError {
    #[error(
        "model.source.path {0}: {1}: give the folder that the server loads, readable for the daemon"
    )]
    Unreadable(PathBuf, String),
    #[error(
        "model.source.path {0}: it holds no *.safetensors: give the folder that the server loads"
    )]
    NoWeights(PathBuf),
    #[error("{0}: it is no JSON object: {1}")]
    Malformed(PathBuf, String),
}

/// What the files say.
#[derive(Clone, Debug)]
pub(crate) struct ModelFolder {
    /// BLAKE3 over the weights' files in the order of their names.
    pub(crate) weights: String,
    pub(crate) config: Value,
    /// `tokenizer.json`.
    pub(crate) tokenizer: Option<Bytes>,
    /// In the form that routers take.
    pub(crate) chat_template: Bytes,
}

/// Reads all of it, the weights too: as long as reading their files takes.
///
/// # Errors
/// [`FolderError`] names the file.
pub(crate) fn read(folder: &Path) -> Result<ModelFolder, FolderError> {
    let config = json(&folder.join("config.json"))?.unwrap_or_default();
    let tokenizer_config = json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let template = template(folder, &tokenizer_config)?;
    let special = |name: &str| match &tokenizer_config[name] {
        Value::String(token) => Some(token.clone()),
        token => token["content"].as_str().map(str::to_owned),
    };
    let adds_bos = tokenizer_config["add_bos_token"].as_bool() == Some(true);
    Ok(ModelFolder {
        weights: weights(folder)?,
        tokenizer: optional(&folder.join("tokenizer.json"))?.map(Bytes::from),
        chat_template: Bytes::from(chat_template_json(
            &template,
            special("bos_token").as_deref(),
            special("eos_token").as_deref(),
            adds_bos,
        )),
        config,
    })
}

/// The file beside the configuration first, as `transformers` takes it; empty where the model has none.
fn template(folder: &Path, tokenizer_config: &Value) -> Result<String, FolderError> {
    if let Some(text) = optional(&folder.join("chat_template.jinja"))? {
        return Ok(String::from_utf8_lossy(&text).into_owned());
    }
    let own = &tokenizer_config["chat_template"];
    // Several by name: the default one serves chats.
    let named = own.as_array().and_then(|templates| {
        let default = templates
            .iter()
            .find(|template| template["name"].as_str() == Some("default"));
        default.map(|template| &template["template"])
    });
    if let Some(text) = own.as_str().or_else(|| named.and_then(Value::as_str)) {
        return Ok(text.to_owned());
    }
    let beside = json(&folder.join("chat_template.json"))?.unwrap_or_default();
    Ok(beside["chat_template"]
        .as_str()
        .unwrap_or_default()
        .to_owned())
}

fn weights(folder: &Path) -> Result<String, FolderError> {
    let unreadable =
        |error: io::Error| FolderError::Unreadable(folder.to_owned(), error.to_string());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(FolderError::NoWeights(folder.to_owned()));
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let broken = |error: io::Error| FolderError::Unreadable(path.clone(), error.to_string());
        let mut file = fs::File::open(&path).map_err(broken)?;
        let length = file.metadata().map_err(broken)?.len();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        // Lengths keep two files and one of both apart.
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name);
        hasher.update(&length.to_le_bytes());
        hasher.update_reader(&mut file).map_err(broken)?;
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

fn optional(path: &Path) -> Result<Option<Vec<u8>>, FolderError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FolderError::Unreadable(path.to_owned(), error.to_string())),
    }
}

fn json(path: &Path) -> Result<Option<Value>, FolderError> {
    let Some(bytes) = optional(path)? else {
        return Ok(None);
    };
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) if value.is_object() => Ok(Some(value)),
        Ok(_) => Err(FolderError::Malformed(
            path.to_owned(),
            "another value".to_owned(),
        )),
        Err(error) => Err(FolderError::Malformed(path.to_owned(), error.to_string())),
    }
}

/// What `config.json` says of attention and positions. Multimodal models keep their language model's under `text_config`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described<'a> {
    whole: &'a Value,
    text: &'a Value,
}

impl<'a> Described<'a> {
    pub(crate) fn of(config: &'a Value) -> Self {
        let text = &config["text_config"];
        Self {
            whole: config,
            text: if text.is_object() { text } else { config },
        }
    }

    fn number(self, name: &str) -> Option<u32> {
        self.text[name]
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
    }

    fn head_size(self) -> Option<u32> {
        self.number("head_dim").or_else(|| {
            self.number("hidden_size")?
                .checked_div(self.number("num_attention_heads")?)
        })
    }

    pub(crate) fn attention(self) -> Fact<Attention> {
        let latent = self.number("kv_lora_rank");
        let attention = || {
            let layers = self.number("num_hidden_layers")?;
            if let Some(rank) = latent {
                // One latent vector with its rotated part serves all heads.
                return Some(Attention {
                    layers,
                    kv_heads: 1,
                    head_size: rank + self.number("qk_rope_head_dim")?,
                    kind: "Mla".to_owned(),
                });
            }
            let heads = self.number("num_attention_heads")?;
            let window = self.window().unwrap_or(0) > 0;
            Some(Attention {
                layers,
                kv_heads: self.number("num_key_value_heads").unwrap_or(heads),
                head_size: self.head_size()?,
                kind: if window { "SlidingWindow" } else { "Full" }.to_owned(),
            })
        };
        attention().map_or_else(Fact::unknown, Fact::observed)
    }

    /// Bytes of one token's keys and values over all layers, for values of so many bytes.
    pub(crate) fn bytes_per_token(self, value_bytes: u64) -> Option<u64> {
        let attention = self.attention();
        let attention = attention.known()?;
        let sides = if attention.kind == "Mla" { 1 } else { 2 };
        let values = u64::from(attention.layers)
            * u64::from(attention.kv_heads)
            * u64::from(attention.head_size);
        Some(sides * values * value_bytes)
    }

    pub(crate) fn rope(self) -> Fact<Rope> {
        let parameters = &self.text["rope_parameters"];
        let base = [&parameters["rope_theta"], &self.text["rope_theta"]]
            .into_iter()
            .find(|base| base.is_number());
        let (Some(base), Some(head)) = (base, self.head_size()) else {
            return Fact::unknown();
        };
        let share = [
            &parameters["partial_rotary_factor"],
            &self.text["partial_rotary_factor"],
        ]
        .into_iter()
        .find_map(Value::as_f64)
        .unwrap_or(1.0);
        let dimensions = match self.number("qk_rope_head_dim") {
            Some(dimensions) => dimensions,
            None => (f64::from(head) * share).round() as u32,
        };
        let scaling = [&self.text["rope_scaling"], parameters]
            .into_iter()
            .find(|scaling| scaling.is_object())
            .map(without_base)
            .filter(|scaling| !is_plain(scaling))
            .map_or("None".to_owned(), |scaling| scaling.to_string());
        Fact::observed(Rope {
            base: base.to_string(),
            dimensions,
            scaling,
        })
    }

    fn window(self) -> Option<u32> {
        if self.text["use_sliding_window"].as_bool() == Some(false) {
            return Some(0);
        }
        match &self.text["sliding_window"] {
            Value::Null => Some(0),
            window => window
                .as_u64()
                .and_then(|window| u32::try_from(window).ok()),
        }
    }

    pub(crate) fn sliding_window(self) -> Fact<u32> {
        if self.number("num_hidden_layers").is_none() {
            return Fact::unknown();
        }
        self.window().map_or_else(Fact::unknown, Fact::observed)
    }

    /// A model that is shown only text has none.
    pub(crate) fn processor(self) -> Fact<String> {
        let sees = ["vision_config", "audio_config", "speech_config"]
            .iter()
            .any(|name| self.whole[*name].is_object());
        if sees || !self.whole.is_object() {
            Fact::unknown()
        } else {
            Fact::observed("None".to_owned())
        }
    }

    /// Of the weights in their files.
    pub(crate) fn dtype(self) -> Option<&'a str> {
        [
            &self.text["dtype"],
            &self.text["torch_dtype"],
            &self.whole["torch_dtype"],
        ]
        .into_iter()
        .find_map(Value::as_str)
    }
}

/// What says nothing but the base, under either name of the rule.
fn without_base(scaling: &Value) -> Value {
    let mut scaling = scaling.clone();
    if let Some(fields) = scaling.as_object_mut() {
        fields.remove("rope_theta");
        fields.remove("partial_rotary_factor");
        if let Some(rule) = fields.remove("type") {
            fields.entry("rope_type").or_insert(rule);
        }
    }
    scaling
}

fn is_plain(scaling: &Value) -> bool {
    scaling
        .as_object()
        .is_some_and(|fields| match fields.get("rope_type") {
            None => fields.is_empty(),
            Some(rule) => fields.len() == 1 && rule.as_str() == Some("default"),
        })
}

#[cfg(test)]
mod tests;
