//! Whether the tables can make up for a binary log that no longer has what was not delivered.

use super::session::Session;
use super::tables::CatalogTable;
use crate::config::PipelineSettings;
use crate::source::SourceFailure;
use crate::source::backfill::Fill;
use crate::source::poll::mysql::tests;

pub async fn agreed(
    session: &mut Session,
    of: &PipelineSettings,
    catalog: &[CatalogTable],
    lost: SourceFailure,
) -> Result<Fill, SourceFailure> {
    let fill = Fill::wanted(of, lost)?;
    for table in catalog {
        fill.needs(&table.quoted(), |column| table.has(column))?;
    }
    if !fill.marks {
        let unmarked = tests(fill.view(), fill.view().scheme.unmarked);
        let (mut rows, mut marked) = (false, false);
        for table in catalog {
            let name = table.quoted();
            let asked = format!(
                "SELECT EXISTS (SELECT 1 FROM {name}), EXISTS (SELECT 1 FROM {name} WHERE ({unmarked}) IS NOT TRUE)"
            );
            let row = session.query_one(&asked).await?;
            (rows, marked) = (rows | row.is_true(0), marked | row.is_true(1));
        }
        if rows && !marked {
            return Err(fill.nobody_marks());
        }
    }
    Ok(fill)
}
