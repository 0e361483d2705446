//! The text of a stand-in's model: the files that a server would have loaded, and its tokens as Baton makes them.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use baton_text::chat::{Chat, Message};
use baton_text::model::ModelText;
use baton_worker::model::artifacts::chat_template_json;
use baton_worker::model::{Model as _, builtin, tiny};
use bytes::Bytes;
use serde::Deserialize as _;
use serde_json::{Value, json};

/// Writes a model's folder in the form in which vLLM loads one, with everything but weights: the tokenizer and the template of a
/// GGUF file, else those of a vocabulary of bytes. `max_length`: tokens of its longest sequence.
///
/// # Errors
/// The GGUF file cannot be read, or the folder not be written.
pub fn write_folder(gguf: Option<&Path>, folder: &Path, max_length: u32) -> Result<()> {
    let facts = match gguf {
        Some(path) => builtin::load(path)?.facts().clone(),
        None => tiny::model(0).facts().clone(),
    };
    let template: Value = serde_json::from_slice(&facts.chat_template)?;
    let shape = facts.shape;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": shape.feed_forward, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "rope_theta": facts.rope.base, "max_position_embeddings": max_length,
    });
    let tokenizer_config = json!({
        "chat_template": template["chat_template"], "bos_token": template["bos_token"],
        "eos_token": template["eos_token"], "add_bos_token": template["add_bos"],
    });
    fs::create_dir_all(folder)?;
    fs::write(folder.join("config.json"), config.to_string())?;
    fs::write(
        folder.join("tokenizer_config.json"),
        tokenizer_config.to_string(),
    )?;
    fs::write(folder.join("tokenizer.json"), &facts.tokenizer)?;
    // A safetensors file of no tensors: nothing computes.
    fs::write(
        folder.join("model.safetensors"),
        [&2_u64.to_le_bytes()[..], b"{}"].concat(),
    )?;
    Ok(())
}

/// Makes tokens.
#[derive(Debug)]
pub struct Text(ModelText);

impl Text {
    /// Of a folder that [`write_folder`] has written.
    ///
    /// # Errors
    /// It lacks a file, or has no tokenizer that can be used.
    pub fn read(folder: &Path) -> Result<Self> {
        let config: Value =
            serde_json::from_slice(&fs::read(folder.join("tokenizer_config.json"))?)?;
        let template = chat_template_json(
            config["chat_template"].as_str().unwrap_or_default(),
            config["bos_token"].as_str(),
            config["eos_token"].as_str(),
            config["add_bos_token"] == true,
        );
        let tokenizer = fs::read(folder.join("tokenizer.json"))?;
        Ok(Self(ModelText::compile(&tokenizer, &template)?))
    }

    /// `POST /tokenize`, with a prompt or with messages. The stand-in makes tokens as Baton does, so Baton finds nothing to object to:
    /// what is seen is what it does with a model whose tokens it may trust.
    ///
    /// # Errors
    /// The body has neither, or a template refuses it.
    pub fn tokenize(&self, body: &Bytes) -> Result<Vec<u32>> {
        let asked: Value = serde_json::from_slice(body)?;
        let flag = |name: &str, otherwise: bool| asked[name].as_bool().unwrap_or(otherwise);
        if let Some(prompt) = asked["prompt"].as_str() {
            return Ok(self
                .0
                .encode(prompt, flag("add_special_tokens", true), "")?);
        }
        let messages = asked.get("messages").context("prompt or messages")?;
        let messages = Vec::<Message>::deserialize(messages)?;
        let text = self.render(messages, flag("add_generation_prompt", true))?;
        Ok(self
            .0
            .encode(&text, flag("add_special_tokens", false), "")?)
    }

    /// Tokens that all chats have in common whose only message begins with `text`.
    ///
    /// # Errors
    /// The template refuses it.
    pub fn chat_beginning(&self, text: &str) -> Result<Vec<u32>> {
        let chat = |text: String| {
            let text = self.render(vec![Message::new("user", &text)], true)?;
            anyhow::Ok(self.0.encode(&text, false, "")?)
        };
        let (one, other) = (chat(format!("{text} 0123"))?, chat(format!("{text} fedc"))?);
        let common = one
            .iter()
            .zip(&other)
            .take_while(|(one, other)| one == other);
        Ok(common.map(|(token, _)| *token).collect())
    }

    fn render(&self, messages: Vec<Message>, add_generation_prompt: bool) -> Result<String> {
        let mut chat = Chat::of(messages);
        chat.add_generation_prompt = add_generation_prompt;
        Ok(self.0.render(&chat, jiff::Timestamp::now())?)
    }
}
