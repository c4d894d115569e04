//! Whether the collections can make up for an oplog that no longer has what was not delivered, and which documents are
//! delivered then.

use mongodb::bson::{Document, RawBsonRef, RawDocument, doc};

use super::change_stream::Watch;
use super::server_error::{self, Doing};
use super::snapshot;
use crate::config::PipelineSettings;
use crate::source::SourceFailure;
use crate::source::backfill::Fill;
use crate::source::poll::View;
use crate::source::poll::mongodb::tests;

pub async fn agreed(of: &PipelineSettings, watch: &Watch, lost: SourceFailure) -> Result<Fill, SourceFailure> {
    let fill = Fill::wanted(of, lost)?;
    // Documents have no columns that could be missing.
    if !fill.marks {
        let unmarked = tests(fill.view(), fill.view().scheme.unmarked);
        let (mut rows, mut marked) = (false, false);
        for (database, collection) in snapshot::namespaces(&watch.client, &watch.scope).await? {
            let found = watch.client.database(&database).collection::<Document>(&collection);
            let doing = Doing::Reading(format!("{database}.{collection}"));
            let failed = |error: mongodb::error::Error| server_error::classify(&error, &doing);
            rows |= found.find_one(doc! {}).projection(doc! { "_id": 1 }).await.map_err(failed)?.is_some();
            let any = found.find_one(doc! { "$nor": [unmarked.clone()] }).projection(doc! { "_id": 1 }).await;
            marked |= any.map_err(failed)?.is_some();
        }
        if rows && !marked {
            return Err(fill.nobody_marks());
        }
    }
    Ok(fill)
}

/// The documents that are not marked.
pub fn filter(view: &View) -> Document {
    let mut any = vec![tests(view, view.scheme.open)];
    any.extend(view.scheme.failed_again.map(|again| tests(view, again)));
    doc! { "$or": any }
}

/// The layout's order; none where it has none of its own.
pub fn order(view: &View) -> Option<Document> {
    let own = !view.scheme.document_order.is_empty();
    own.then(|| view.order.iter().map(|field| (field.clone(), 1.into())).collect())
}

/// What orders a document among those of its group, whatever its time says.
pub fn version(view: &View, document: &RawDocument) -> Option<(Vec<u8>, i64)> {
    let (group, version) = view.scheme.within?;
    let group = document.get(view.name(group)).ok().flatten();
    let version = match document.get(view.name(version)) {
        Ok(Some(RawBsonRef::Int32(number))) => i64::from(number),
        Ok(Some(RawBsonRef::Int64(number))) => number,
        Ok(Some(RawBsonRef::Double(number))) => number as i64,
        _ => 0,
    };
    Some((format!("{group:?}").into_bytes(), version))
}
