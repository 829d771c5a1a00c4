"""curlfree: measure, train and use vector fields that should be gradients.

A **process** perturbs data, a **field** predicts scores (or forces), its Jacobian is a linear **operator**
whose skew part measures how far the field is from conservative; **estimators** turn it into numbers and the
**penalty** into gradients.
"""

from curlfree.distributions import Checkerboard, GaussianMixture, Spirals, eight_gaussians
from curlfree.estimators import (
    asymmetry,
    circle_work,
    gaussian,
    loop_work,
    normalized_asymmetry,
    rademacher,
    sphere,
)
from curlfree.fieldcheck import check_field
from curlfree.fields import (
    AngularVelocityPrediction,
    Autoencoder,
    DataPrediction,
    DenoiserEnergy,
    DenoiserField,
    EnergyField,
    FlowPrediction,
    InnerProductEnergy,
    LinearField,
    NoisePrediction,
    PaperEnergy,
    PaperField,
    Preconditioned,
    Rotation,
    ScalarEnergy,
    ScoreNormEnergy,
)
from curlfree.metrics import Audit, audit, rotation_density
from curlfree.objectives import Loss, dsm, esm, ism, sigma2, sigma4, ssm, total_loss
from curlfree.operators import Field, Operator, jacobian
from curlfree.penalty import algorithm1, qc_loss
from curlfree.processes import VE, VP, Discrete, Linear, Process

__version__ = "0.1.0"

__all__ = [
    "VE",
    "VP",
    "AngularVelocityPrediction",
    "Audit",
    "Autoencoder",
    "Checkerboard",
    "DataPrediction",
    "DenoiserEnergy",
    "DenoiserField",
    "Discrete",
    "EnergyField",
    "Field",
    "FlowPrediction",
    "GaussianMixture",
    "InnerProductEnergy",
    "Linear",
    "LinearField",
    "Loss",
    "NoisePrediction",
    "Operator",
    "PaperEnergy",
    "PaperField",
    "Preconditioned",
    "Process",
    "Rotation",
    "ScalarEnergy",
    "ScoreNormEnergy",
    "Spirals",
    "algorithm1",
    "asymmetry",
    "audit",
    "check_field",
    "circle_work",
    "dsm",
    "eight_gaussians",
    "esm",
    "gaussian",
    "ism",
    "jacobian",
    "loop_work",
    "normalized_asymmetry",
    "qc_loss",
    "rademacher",
    "rotation_density",
    "sigma2",
    "sigma4",
    "sphere",
    "ssm",
    "total_loss",
]
