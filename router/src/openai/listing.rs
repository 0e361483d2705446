//! `GET /v1/models`: what is served.

use serde::Serialize;

use crate::run::ModelListing;

#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Debug, Serialize)]
pub struct Model {
    id: String,
    object: &'static str,
    /// When its policy came into force, seconds since the epoch.
    created: i64,
    owned_by: &'static str,
    root: String,
    parent: Option<String>,
    /// Tokens of prompt and answer together; null while no worker is known.
    max_model_len: Option<u32>,
}

impl From<ModelListing> for Model {
    fn from(listing: ModelListing) -> Self {
        Self {
            root: listing.id.clone(),
            id: listing.id,
            object: "model",
            created: listing.created,
            owned_by: "baton",
            parent: None,
            max_model_len: listing.max_context,
        }
    }
}

/// The body of the list.
pub fn list(models: Vec<ModelListing>) -> ModelList {
    ModelList {
        object: "list",
        data: models.into_iter().map(Model::from).collect(),
    }
}
