"""Trackers that cannot work: the run says so in a sentence and ends as if they had not been asked for."""

from hostile import Row, trainer

NO_RETRY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}  # the course waits for some seconds
GONE = ("engine.trackers=[mlflow]", "engine.mlflow_uri=http://127.0.0.1:9")
ASIDE = "is set aside; training continues without it"


def tensorboard_is_a_file(folder):
    (folder / "run").mkdir()
    (folder / "run" / "tensorboard").write_text("no folder")


def mlflow_is_no_database(folder):
    (folder / "run").mkdir()
    (folder / "run" / "mlflow.db").write_text("no database " * 1000)


ROWS = [
    Row("an MLflow server that is not there", trainer(*GONE), ("MlflowTracker failed", ASIDE, "The report"), 0, environment=NO_RETRY),
    Row(
        "a store of MLflow's that does not exist", trainer("engine.trackers=[mlflow]", "engine.mlflow_uri=nonsense://x"),
        ("MlflowTracker", ASIDE, "nonsense"), 0,
    ),
    Row(
        "a file in the place of TensorBoard's folder", trainer("engine.trackers=[tensorboard]"), ("TensorBoardTracker", ASIDE), 0,
        make=tensorboard_is_a_file,
    ),
    Row(
        "a text in the place of MLflow's database", trainer("engine.trackers=[mlflow]"), ("MlflowTracker", ASIDE), 0,
        make=mlflow_is_no_database,
    ),
    Row("W&B without an account", trainer("engine.trackers=[wandb]", "engine.wandb_mode=online"), ("WandbTracker", ASIDE, "No API key"), 0),
]  # fmt: skip
