// The extension has no Python functions: importing it registers the kernels of cpu/ and cuda/ with torch.
#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
