"""The names that are the same objects for all four frameworks, only for type checkers: they are loaded on first use.

See :mod:`manyhands.names`.
"""

from manyhands.audit.guard import assert_no_stalls as assert_no_stalls
from manyhands.audit.guard import guard as guard
from manyhands.forecast.measured import forecast as forecast
from manyhands.tasks.scope import task as task
from manyhands.training.callbacks import loggers as loggers
from manyhands.training.callbacks.builtin import EMA as EMA
from manyhands.training.callbacks.builtin import BestCheckpoint as BestCheckpoint
from manyhands.training.callbacks.builtin import EarlyStopping as EarlyStopping
from manyhands.training.callbacks.builtin import LearningRateMonitor as LearningRateMonitor
from manyhands.training.callbacks.callback import Callback as Callback
from manyhands.training.callbacks.display import Progress as Progress
from manyhands.training.loss.own_step import LossSum as LossSum
from manyhands.training.options import Checkpoints as Checkpoints
from manyhands.training.options import Limits as Limits
from manyhands.training.options import Step as Step
from manyhands.training.options import Workers as Workers
from manyhands.training.result import Result as Result
from manyhands.training.schedules import PerEpoch as PerEpoch
from manyhands.training.schedules import PerStep as PerStep
from manyhands.training.schedules import by_step as by_step
from manyhands.training.schedules import one_cycle as one_cycle
from manyhands.training.stopping import Stopped as Stopped
