"""Are blocks best placed where the signal is strongest, and can a certificate be trusted?"""
